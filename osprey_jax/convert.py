"""Stage 3: turn a pruned backbone into a drafter for a target, with the target's vocabulary.

python -m osprey_jax.convert --source DIR --target DIR --out DIR [--tap-layers A B C] [--random-weights SEED]
"""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import transformers
from flax import nnx
from tqdm import tqdm

from osprey_jax.command import ArgumentParser, UserError, run
from osprey_jax.data.tokenizer import check_tokenizer, copy_tokenizer, load_tokenizer, rows_needed
from osprey_jax.data.vocabulary import Alignment, align
from osprey_jax.files import new_directory, read_json, write_json
from osprey_jax.models.causal_lm import CausalLM
from osprey_jax.models.hf import (
    TensorFiles,
    abstract_causal_lm,
    check_tensors,
    model_tensors,
    tensor_shapes,
    vocabulary_tensors,
    write_checkpoint,
)
from osprey_jax.models.hf_config import DRAFTER_ARCHITECTURES, check_tap_layers, config_path, transformer_config

WIDENED = ("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight")
SPECIAL_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")


def convert(
    source: str | Path,
    target: str | Path,
    out: str | Path,
    *,
    tap_layers: tuple[int, int, int] | None = None,
    random_seed: int | None = None,
) -> dict[str, int]:
    """Write to `out` the drafter made of backbone `source` for `target`, in the released layout.

    Args:
      source: HF checkpoint of a (pruned) Qwen3 or Llama with its tokenizer.
      target: directory with the target's `config.json` and tokenizer, of any architecture; its weights are not read.
      tap_layers: 0-based blocks of the target to write into the config; None writes none.
      random_seed: replaces the source's weights by fresh random ones first: the control of an experiment.

    Returns:
      The counts of the vocabulary alignment, as in `tokenizer_alignment.json`.

    Raises:
      UserError: one of the inputs cannot be used, or `out` already holds something.
    """
    source, target = Path(source), Path(target)
    config = transformer_config(source)
    files = TensorFiles(source)
    check_tensors(files, abstract_causal_lm(config))
    if random_seed is not None and not 0 <= random_seed < 2**32:
        raise UserError(f"random seed {random_seed} is not within 0..2^32-1")

    target_config = read_json(config_path(target))
    hidden_size, vocab_size = (_size(target_config, key, target) for key in ("hidden_size", "vocab_size"))
    if tap_layers is not None:
        tap_layers = check_tap_layers(tap_layers, _size(target_config, "num_hidden_layers", target))
    source_tokenizer, target_tokenizer = load_tokenizer(source), load_tokenizer(target)
    check_tokenizer(source_tokenizer, config.vocab_size, str(source))
    vocab_size = max(vocab_size, rows_needed(target_tokenizer))
    special = special_token_ids(target_config, target_tokenizer)

    with new_directory(out) as directory:
        alignment = align(source_tokenizer, target_tokenizer, vocab_size)
        names = tensor_shapes(abstract_causal_lm(config))
        backbone = {name: files.read(name) for name in tqdm(names, desc="read", unit="tensor", disable=None)}
        if random_seed is not None:
            fresh = model_tensors(CausalLM(config, rngs=nnx.Rngs(random_seed)))
            backbone = {name: fresh[name].astype(value.dtype) for name, value in backbone.items()}
        tensors = drafter_tensors(backbone, config.num_layers, hidden_size, alignment)

        raw = {key: value for key, value in read_json(config_path(source)).items() if key not in SPECIAL_TOKENS}
        raw |= {
            "architectures": [DRAFTER_ARCHITECTURES[raw["model_type"]]],
            "vocab_size": vocab_size,
            "draft_vocab_size": vocab_size,
            "target_hidden_size": hidden_size,
            "swap_h_and_emb": True,
            "tie_word_embeddings": False,
        }
        if tap_layers is not None:
            raw["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": list(tap_layers), "use_aux_hidden_state": True}
        write_checkpoint(directory, tensors, raw | special)
        write_json(directory / "tokenizer_alignment.json", alignment.report())
        copy_tokenizer(target, directory)
        generation = directory / "generation_config.json"
        if generation.is_file():
            # The target's own values stay, they can be richer (several ids that end a turn).
            undefined = set(SPECIAL_TOKENS) - set(special)
            write_json(generation, {k: v for k, v in read_json(generation).items() if k not in undefined})
    return alignment.report()


def drafter_tensors(
    backbone: Mapping[str, np.ndarray], num_layers: int, target_hidden_size: int, alignment: Alignment
) -> dict[str, np.ndarray]:
    """A backbone's tensors as a drafter's that computes the same: what it adds, it multiplies by zero.

    q, k and v read [constant | stream]: zeros on the constant's half. `fc` hands on the deepest tap, as far as the
    widths allow: zero there too would be a stationary point, from which it never trains.
    """
    embedding = backbone["model.embed_tokens.weight"]
    width, dtype = embedding.shape[1], embedding.dtype
    embedding_VxH = alignment.apply(embedding)
    head = backbone.get("lm_head.weight")  # absent where tied
    shared = min(width, target_hidden_size)
    fc_Hx3T = np.zeros((width, 3 * target_hidden_size), dtype)
    fc_Hx3T[np.arange(shared), 2 * target_hidden_size + np.arange(shared)] = 1
    tensors = {
        "embed_tokens.weight": embedding_VxH,
        "fc.weight": fc_Hx3T,
        "norm.weight": backbone["model.norm.weight"],
        "lm_head.weight": embedding_VxH if head is None else alignment.apply(head),
    }
    for i in range(num_layers):
        old, new = f"model.layers.{i}.", "midlayer." if num_layers == 1 else f"layers.{i}."
        layer = {name.removeprefix(old): value for name, value in backbone.items() if name.startswith(old)}
        for name in WIDENED:
            layer[name] = np.concatenate([np.zeros_like(layer[name]), layer[name]], axis=1)
        layer["hidden_norm.weight"] = layer["input_layernorm.weight"]
        tensors |= {new + name: value for name, value in layer.items()}
    return tensors | vocabulary_tensors(None, len(embedding_VxH))


def special_token_ids(config: dict, tokenizer: transformers.PreTrainedTokenizerBase) -> dict[str, int | list[int]]:
    """The ids that a config defines, else its tokenizer; a key that neither defines is left out."""
    ids = {}
    for key in SPECIAL_TOKENS:
        value = config.get(key)
        ids[key] = getattr(tokenizer, key) if value is None else value
    return {key: value for key, value in ids.items() if value is not None}


def _size(config: dict, key: str, where: Path) -> int:
    value = config.get(key)
    if not isinstance(value, int) or value < 1:
        raise UserError(f"{where}: config.json has no usable {key} ({value!r}); is it a language model's?")
    return value


def main() -> None:
    parser = ArgumentParser(prog="python -m osprey_jax.convert", description=__doc__.splitlines()[0])
    parser.add_argument("--source", required=True, type=Path, metavar="DIR", help="HF checkpoint of a backbone")
    parser.add_argument("--target", required=True, type=Path, metavar="DIR", help="config and tokenizer of the target")
    parser.add_argument("--out", required=True, type=Path, metavar="DIR", help="where the result goes; must not exist")
    parser.add_argument(
        "--tap-layers", type=int, nargs=3, metavar=("A", "B", "C"), help="blocks of the target to read, 0-based"
    )
    parser.add_argument(
        "--random-weights", type=int, metavar="SEED", help="the control: random weights in place of the source's"
    )
    arguments = parser.parse_args()
    counts = convert(
        arguments.source,
        arguments.target,
        arguments.out,
        tap_layers=arguments.tap_layers,
        random_seed=arguments.random_weights,
    )
    print(f"{arguments.out}: " + ", ".join(f"{name} {count}" for name, count in counts.items()))


if __name__ == "__main__":
    run(main)
