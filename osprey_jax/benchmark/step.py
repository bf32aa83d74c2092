"""A step of distillation beside the same step in PyTorch, put together as the released trainer's is.

Both sides run as processes of their own that step by turns, on the same cores, in float32, from the same weights and
batch, of which 75% is supervised; their first losses must agree. The target's forward pass is left out on both sides:
its taps and last hidden state are given, its head product is not. Memory is the largest resident size of each process,
from its start to its last step.
"""

import dataclasses
import importlib.util
import math
import sys

from osprey_jax.benchmark import step_inputs
from osprey_jax.benchmark.step_inputs import StepShape
from osprey_jax.benchmark.timing import (
    Child,
    alternate,
    arguments_of_child,
    benchmark_parser,
    positive,
    serve,
    speedup,
)
from osprey_jax.command import UserError, run
from osprey_jax.reports.tables import console_table

HEADER = ("S", "V", "tokens/s, ours / peer", "by CPU time", "peak memory, ours / peer", "ours, GiB", "peer, GiB")
WARM_UP = 2  # steps of each side before the first that counts: the first compiles


def measure(shape: StepShape, torch_python: str, *, threads: int, repeats: int, chunk: int) -> tuple:
    """A row of `HEADER`. Raises `UserError` where a side fails or the two do not compute the same loss."""
    numbers = dataclasses.asdict(shape)
    with (
        Child(sys.executable, "osprey_jax.benchmark.step", numbers | {"chunk": chunk}, threads) as ours,
        Child(torch_python, "osprey_jax.benchmark.torch_step", numbers | {"threads": threads}, threads) as peer,
    ):
        for _ in range(WARM_UP):
            ours.step(), peer.step()
            if not math.isclose(ours.loss, peer.loss, rel_tol=1e-3):
                raise UserError(f"the two sides disagree: our loss is {ours.loss}, the peer's {peer.loss}")
        by_clock, by_cpu = speedup(alternate(ours.step, peer.step, repeats))
        memory = ours.peak_bytes(), peer.peak_bytes()
    sizes = (memory[0] / memory[1], *(size / 2**30 for size in memory))
    return (shape.sequence, shape.vocab, by_clock, by_cpu, *sizes)


# ---- our side, in a process of its own


def our_step(shape: StepShape, chunk: int):
    """A function that takes a step, as `train` does, and returns its loss."""
    import jax
    import jax.numpy as jnp
    from flax import nnx

    from osprey_jax import config
    from osprey_jax.kernels.precision import exact_products
    from osprey_jax.models import hf
    from osprey_jax.models.drafter import DrafterConfig
    from osprey_jax.models.transformer import TransformerConfig
    from osprey_jax.objectives.shift import shift_left
    from osprey_jax.objectives.ttt import Distillation
    from osprey_jax.training.compilation import compiled
    from osprey_jax.training.mesh import layout, make_mesh, parameter_shardings, replicated, rows_over
    from osprey_jax.training.optimizer import make_optimizer
    from osprey_jax.training.state import make_train_step, new_state

    class Given(Distillation):
        """Distillation from what the target gave before: taps and last hidden state are in the batch."""

        def teach(self, constants, frozen, batch):
            return {"taps": batch["taps"], "hidden": shift_left(batch["hidden"], 1, batch["segment_ids"])}

    def numbers(**others) -> TransformerConfig:
        return TransformerConfig(
            vocab_size=shape.vocab,
            rms_norm_eps=shape.eps,
            rope_theta=shape.rope_theta,
            rope_scaling=None,
            qk_norm=True,
            attention_bias=False,
            mlp_bias=False,
            initializer_range=0.02,
            max_position_embeddings=shape.sequence + shape.steps,
            **others,
        )

    transformer = numbers(
        hidden_size=shape.width,
        intermediate_size=shape.inner,
        num_layers=shape.layers,
        num_heads=shape.heads,
        num_kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        tie_word_embeddings=False,
    )
    # Of the target only the head is there: that of a tied model, whose one block nobody runs.
    block = {"num_layers": 1, "num_heads": 1, "num_kv_heads": 1, "head_dim": 2, "intermediate_size": 1}
    target = hf.abstract_causal_lm(numbers(hidden_size=shape.target_width, tie_word_embeddings=True, **block))
    drafter = hf.abstract_drafter(DrafterConfig(transformer, shape.target_width, shape.vocab, True, None))
    drafter_def, abstract = nnx.split(drafter)
    target_def, frozen = nnx.split(target)

    mesh = make_mesh(config.Mesh(data=1, tensor=1), shape.rows, jax.devices()[:1])
    shardings, whole = parameter_shardings(abstract, mesh, trained=True), replicated(mesh)
    weights = step_inputs.drafter_weights(shape)
    state = jax.tree.map(lambda _, sharding: sharding, abstract, shardings)
    for path, variable in nnx.to_flat_state(state):
        variable.set_value(jax.device_put(weights.pop(".".join(map(str, path))), variable.get_value(), may_alias=False))
    frozen = jax.tree.map(lambda x: jax.device_put(jnp.zeros(x.shape, x.dtype), whole), frozen)
    frozen["embed_tokens"]["weight"].set_value(jax.device_put(step_inputs.target_head(shape), whole, may_alias=False))

    arrays = step_inputs.batch(shape)
    arrays["loss_mask"] = arrays["loss_mask"].astype("int32")
    arrays["segment_ids"] = (arrays["token_ids"] >= 0).astype("int32")
    arrays["positions"] = arrays["segment_ids"].cumsum(axis=1, dtype="int32") - 1
    rows = rows_over(mesh, leading=1)
    batch = {name: jax.device_put(x[None], rows, may_alias=False) for name, x in arrays.items()}

    ttt = config.TTT(length=shape.steps, decay=shape.decay, loss_chunk=chunk)
    objective = Given(drafter_def, target_def, (0, 0, 0), ttt, jnp.dtype("float32"), layout=layout(shardings, mesh))
    constant_rate = config.Optimizer(learning_rate=shape.learning_rate, warmup_fraction=0, clip_norm=shape.clip_norm)
    optimizer = make_optimizer(constant_rate, steps=10**6)
    params, constants = nnx.split_state(state, nnx.Param, ...)
    current = [new_state(params, constants, optimizer)]
    train_step = make_train_step(objective, optimizer, mesh, current[0], frozen)
    with exact_products(jnp.dtype("float32")):
        train_step = compiled(train_step, current[0], frozen, batch)

    def step() -> float:
        new, metrics = train_step(current.pop(), frozen, batch)
        current.append(jax.block_until_ready(new))
        return float(metrics["loss"])

    return step


# ---- the command


def main(argv: list[str]) -> None:
    parser = benchmark_parser("step", __doc__)
    parser.add_argument(
        "--shapes",
        nargs="+",
        default=["512x16384", "1024x32768"],
        metavar="SxV",
        help="positions of a row x vocabulary (default: 512x16384 1024x32768)",
    )
    parser.add_argument("--torch-python", metavar="PATH", help="an interpreter that has PyTorch (default: this one)")
    parser.add_argument("--threads", type=positive, default=2, help="of each side (default: 2)")
    parser.add_argument("--repeats", type=positive, default=9, help="pairs of steps; medians are printed (default: 9)")
    parser.add_argument("--chunk", type=positive, default=128, help="our ttt.loss_chunk (default: 128)")
    arguments = parser.parse_args(argv)
    shapes = [_shape(text) for text in arguments.shapes]
    python = arguments.torch_python or _this_python()
    options = {"threads": arguments.threads, "repeats": arguments.repeats, "chunk": arguments.chunk}
    print(console_table(HEADER, [measure(shape, python, **options) for shape in shapes]))


def _shape(text: str) -> StepShape:
    sequence, _, vocab = text.partition("x")
    if not (sequence.isdecimal() and vocab.isdecimal() and int(sequence) > 5 and int(vocab) > 1):
        raise UserError(f"--shapes {text}: give positions x vocabulary, such as 512x16384")
    return StepShape(int(sequence), int(vocab))


def _this_python() -> str:
    if importlib.util.find_spec("torch") is None:
        raise UserError(
            "the peer needs PyTorch, which is not part of this project: python -m venv torch-venv && "
            "torch-venv/bin/pip install torch==2.13.0 numpy, then --torch-python torch-venv/bin/python"
        )
    return sys.executable


def _serve() -> None:
    arguments = arguments_of_child()
    chunk = arguments.pop("chunk")
    serve(our_step(StepShape(**arguments), chunk))


if __name__ == "__main__":  # in a process of its own
    run(_serve)
