"""The pretraining step beside its dense form: whole logits, whole attention scores, plain autodiff.

Both run in this process by turns, in float32, on the same packed rows, in the same optimizer. Temporaries are what the
compiled step needs beside its arguments and results.

Axes: B rows, S sequence, N heads, G key/value heads, h head size, D width, V vocabulary.
"""

import dataclasses
import math
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
from flax import nnx

from osprey_jax import config
from osprey_jax.benchmark.random_run import RandomRun, random_batch
from osprey_jax.benchmark.shapes import QWEN3_4B_2LAYER, pretrain_config
from osprey_jax.benchmark.timing import alternate, benchmark_parser, positive, speedup, timed
from osprey_jax.command import UserError
from osprey_jax.models.transformer import TransformerConfig
from osprey_jax.objectives.next_token import NextToken
from osprey_jax.objectives.shift import shift_left
from osprey_jax.reports.tables import console_table
from osprey_jax.training.mesh import make_mesh
from osprey_jax.training.stages import design

HEADER = (
    "rows",
    "S",
    "V",
    "tokens/s, ours / dense",
    "by CPU time",
    "temporaries, ours / dense",
    "ours, GiB",
    "dense, GiB",
)


class DenseNextToken(NextToken):
    """The same loss and model, written down as a formula."""

    def loss(self, params, constants, frozen, batch, lessons, weights_BxS):
        model, segments = nnx.merge(self.model_def, params, constants), batch["segment_ids"]
        causal_SxS = jnp.tril(jnp.ones((segments.shape[1],) * 2, bool))
        mask_Bx1xSxS = (causal_SxS & (segments[:, :, None] == segments[:, None]))[:, None]

        def attend(q_BxSxNxh, k_BxSxGxh, v_BxSxGxh, memory):
            return jax.nn.dot_product_attention(q_BxSxNxh, k_BxSxGxh, v_BxSxGxh, mask=mask_Bx1xSxS), memory

        embedding_BxSxD = model.embed_tokens(batch["token_ids"], self.dtype)
        hidden_BxSxD = model.trained(
            embedding_BxSxD, batch["positions"], attend, whole=lambda layer: layer, remat="none"
        )
        log_BxSxV = jax.nn.log_softmax(model.logits(hidden_BxSxD), axis=-1)
        labels_BxS = shift_left(batch["token_ids"], 1, segments)
        ce_BxS = -jnp.take_along_axis(log_BxSxV, labels_BxS[..., None], axis=-1)[..., 0]
        correct_BxS = jnp.argmax(log_BxSxV, axis=-1) == labels_BxS
        loss, taught_BxS = jnp.sum(weights_BxS * ce_BxS), weights_BxS > 0
        sums = {"ce_sum": ce_BxS, "correct": correct_BxS, "supervised": taught_BxS}
        return loss, {"loss": loss} | {name: jnp.sum(x * taught_BxS) for name, x in sums.items()}


def measure(model: TransformerConfig, *, rows: int, length: int, chunk: int, repeats: int) -> tuple:
    """A row of `HEADER`. Raises `UserError` where the two do not compute the same loss."""
    mesh = make_mesh(config.Mesh(), rows, jax.devices()[:1])
    with tempfile.TemporaryDirectory() as directory:
        run = pretrain_config(Path(directory), model, rows=rows, length=length, loss_chunk=chunk)
        planned = design(run, mesh)
        dense = DenseNextToken(**{f.name: getattr(planned.objective, f.name) for f in dataclasses.fields(NextToken)})
        sides = RandomRun(run, planned, mesh), RandomRun(run, planned, mesh, objective=dense)
    batch = sides[0].place(random_batch(rows=rows, length=length, vocab=model.vocab_size, segment=length // 4))
    for _ in range(2):
        losses = [side.step(batch) for side in sides]
        if not math.isclose(*losses, rel_tol=1e-3):
            raise UserError(f"the two sides disagree: our loss is {losses[0]}, the dense one {losses[1]}")
    ours, peer = (lambda side=side: timed(lambda: side.step(batch)) for side in sides)
    temporaries = [side.temporary_bytes for side in sides]
    sizes = (temporaries[0] / temporaries[1], *(size / 2**30 for size in temporaries))
    return (rows, length, model.vocab_size, *speedup(alternate(ours, peer, repeats)), *sizes)


def miniature(vocab: int) -> TransformerConfig:
    """The backbone's two layers in narrow."""
    sizes = {"hidden_size": 256, "intermediate_size": 1024, "num_heads": 8, "num_kv_heads": 4, "head_dim": 32}
    return dataclasses.replace(QWEN3_4B_2LAYER, vocab_size=vocab, **sizes)


def main(argv: list[str]) -> None:
    parser = benchmark_parser("pretrain", __doc__)
    parser.add_argument(
        "--shapes",
        nargs="+",
        default=["2x1024x16384", "1x2048x32768"],
        metavar="BxSxV",
        help="rows x positions of a row x vocabulary (default: 2x1024x16384 1x2048x32768)",
    )
    parser.add_argument("--repeats", type=positive, default=9, help="pairs of steps; medians are printed (default: 9)")
    parser.add_argument("--chunk", type=positive, default=512, help="our loss_chunk (default: 512)")
    arguments = parser.parse_args(argv)
    rows = []
    for rows_, length, vocab in map(_shape, arguments.shapes):
        options = {"rows": rows_, "length": length, "chunk": arguments.chunk, "repeats": arguments.repeats}
        rows.append(measure(miniature(vocab), **options))
    print(console_table(HEADER, rows))


def _shape(text: str) -> tuple[int, int, int]:
    sizes = text.split("x")
    if len(sizes) != 3 or not all(size.isdecimal() and int(size) > 0 for size in sizes) or int(sizes[1]) < 8:
        raise UserError(f"--shapes {text}: give rows x positions (8 or more) x vocabulary, such as 2x1024x16384")
    return tuple(map(int, sizes))
