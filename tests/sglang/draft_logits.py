"""Run by SGLang's Python, 0.5.9 or 0.5.23, once a rank: what the classes that SGLang finds for drafts compute.

`draft_logits.py OUT RANK WORLD PORT DRAFT...`: each DRAFT holds a checkpoint and `inputs.npz`: `token_ids` (S) and
`features` (S, 3T), read at once; `more` (K), then read one a step, each with the stream that came before; and perhaps
`target_embedding` (V, T), which the draft is offered. OUT/<name of DRAFT>.npz gets `logits` (K+1, V), `streams`
(S+K, H) and the `module` of the class, or `error`, the message of a `ValueError`. The checkpoint is read by SGLang's
own loader and the model called as SGLang's workers call it; the attention backend alone is a stand-in.
"""

import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import sgl_kernel
import stand_in
import torch
from sglang.version import __version__

if __version__ == "0.5.9":  # imports kernels for caches on other devices
    stand_in.stand_in_below(sgl_kernel.__name__)

from sglang.srt.configs.device_config import DeviceConfig
from sglang.srt.configs.load_config import LoadConfig
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.layers.vocab_parallel_embedding import VocabParallelEmbedding
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch, ForwardMode
from sglang.srt.model_loader import get_model
from sglang.srt.server_args import ServerArgs


class Attention:
    """Causal attention of one request; keeps the keys and values of each layer."""

    def __init__(self):
        self.seen = {}

    def forward(self, q, k, v, layer, forward_batch, save_kv_cache=True, **unused):
        q = q.view(-1, layer.tp_q_head_num, layer.head_dim)
        before = self.seen.get(layer.layer_id)
        if before is not None:
            k, v = torch.cat([before[0], k]), torch.cat([before[1], v])
        self.seen[layer.layer_id] = k, v
        n, t = len(q), len(k)
        q, k, v = (x.transpose(0, 1) for x in (q, k, v))
        k, v = (x.repeat_interleave(len(q) // len(k), dim=0) for x in (k, v))
        ahead = torch.arange(t) > torch.arange(t - n, t)[:, None]
        scores = (q @ k.transpose(1, 2) * layer.scaling).masked_fill(ahead, float("-inf"))
        return (scores.softmax(-1) @ v).transpose(0, 1).reshape(n, -1)


def start(draft: str, rank: int, world: int, port: int) -> ServerArgs:
    """The process groups and settings that a worker has when it loads its draft."""
    args = ServerArgs(model_path=draft, device="cpu", dtype="float32", tp_size=world, attention_backend="torch_native")
    if __version__ == "0.5.9":
        from sglang.srt.distributed import init_distributed_environment, initialize_model_parallel
        from sglang.srt.layers.dp_attention import initialize_dp_attention
        from sglang.srt.server_args import set_global_server_args_for_scheduler

        set_global_server_args_for_scheduler(args)
        init_distributed_environment(world, rank, f"tcp://127.0.0.1:{port}", rank, backend="gloo")
        initialize_model_parallel(world, backend="gloo")
        initialize_dp_attention(args, ModelConfig.from_server_args(args, is_draft_model=True))
    else:
        from sglang.srt.distributed.bootstrap import init_parallel_runtime
        from sglang.srt.runtime_context import SpawnRanks, publish

        publish(args, role="scheduler", ranks=SpawnRanks(world_rank=rank, gpu_id=rank, dp_rank=None))
        init_parallel_runtime(server_args=args, device="cpu", dist_port=port)
    return args


def run(args: ServerArgs, draft: str) -> dict[str, torch.Tensor | str]:
    config = ModelConfig.from_server_args(args, model_path=draft, is_draft_model=True)
    model = get_model(model_config=config, load_config=LoadConfig(), device_config=DeviceConfig("cpu"))
    given = {name: torch.from_numpy(value) for name, value in np.load(Path(draft, "inputs.npz")).items()}
    if "target_embedding" in given:
        table = VocabParallelEmbedding(*given["target_embedding"].shape)
        table.weight_loader(table.weight, given["target_embedding"])
        model.set_embed(table.weight)
    attention, position = Attention(), len(given["token_ids"])
    logits, stream = call(model, attention, ForwardMode.EXTEND, given["token_ids"], 0, given["features"])
    all_logits, streams = [logits], [stream]
    for token in given["more"]:
        logits, stream = call(model, attention, ForwardMode.DECODE, token[None], position, stream[-1:])
        all_logits.append(logits)
        streams.append(stream)
        position += 1
    return {"logits": torch.cat(all_logits), "streams": torch.cat(streams), "module": type(model).__module__}


def call(model, attention, mode, token_ids, position, hidden):
    """(logits of the last token, streams of all)."""
    n = len(token_ids)
    length = torch.tensor([n])
    batch = ForwardBatch(
        forward_mode=mode,
        batch_size=1,
        input_ids=token_ids,
        req_pool_indices=torch.zeros(1, dtype=torch.int64),
        seq_lens=length + position,
        out_cache_loc=torch.arange(n),
        seq_lens_sum=n + position,
        positions=torch.arange(position, position + n),
        extend_seq_lens=length,
        extend_seq_lens_cpu=[n],
        spec_info=SimpleNamespace(hidden_states=hidden),
        capture_hidden_mode=CaptureHiddenMode.FULL,
    )
    if __version__ == "0.5.9":
        batch.attn_backend = attention
        out = model.forward(token_ids, batch.positions, batch)
    else:
        from sglang.srt.model_executor.forward_context import ForwardContext, forward_context

        with forward_context(ForwardContext(attn_backend=attention)):
            out = model.forward(token_ids, batch.positions, batch)
    return out.next_token_logits, out.hidden_states


def main() -> None:
    out, rank, world, port, *drafts = sys.argv[1:]
    args = start(drafts[0], int(rank), int(world), int(port))
    for draft in drafts:
        try:
            with torch.no_grad():
                found = run(args, draft)
        except ValueError as error:
            found = {"error": str(error)}
        if rank == "0":
            np.savez(Path(out, f"{Path(draft).name}.npz"), **found)


if __name__ == "__main__":
    main()
