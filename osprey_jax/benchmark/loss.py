"""The fused loss beside whole logits that JAX differentiates, loss and gradients, at several sizes.

Five steps share a teacher and three quarters of the positions are supervised. On a GPU in bfloat16 and with the widths
of a drafter for Qwen3-8B, elsewhere in float32 and with small ones. The two sides take turns; temporaries are what the
compiler reserves beside inputs and gradients.
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp

from osprey_jax.benchmark.timing import alternate, benchmark_parser, speedup, timed
from osprey_jax.kernels.soft_cross_entropy import soft_cross_entropy
from osprey_jax.reports.tables import console_table

HEADER = ("N", "V", "dense / ours", "by CPU time", "ours, MiB", "dense, MiB", "ours, ms", "dense, ms")
STEPS = 5


def dense_cross_entropy(hidden_KxNxH, head_VxH, teacher_hidden_NxT, teacher_head_VxT, weight_KxN) -> jax.Array:
    """What `soft_cross_entropy` computes, from the logits of all positions and steps."""
    logits = partial(jnp.einsum, "...d,vd->...v", preferred_element_type=jnp.float32)
    teacher_NxV = jax.nn.softmax(logits(teacher_hidden_NxT, teacher_head_VxT))
    student_KxNxV = logits(hidden_KxNxH, head_VxH.astype(hidden_KxNxH.dtype))
    ce_KxN = jax.nn.logsumexp(student_KxNxV, axis=-1) - jnp.sum(teacher_NxV * student_KxNxV, axis=-1)
    return jnp.sum(weight_KxN * ce_KxN)


def gradients(loss: Callable) -> Callable:
    """Jitted (hidden, head, teacher's hidden, teacher's head, weight) -> (loss, gradients of the first two)."""
    return jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))


def fused(chunk: int) -> Callable:
    return lambda *arguments: soft_cross_entropy(*arguments, chunk=chunk)[0]


def shapes(make: Callable, N: int, V: int, H: int, T: int, dtype) -> tuple:
    """The loss's arguments; `make(shape, dtype)` makes each. The student's head is a float32 master."""
    return (
        make((STEPS, N, H), dtype),
        make((V, H), jnp.float32),
        make((N, T), dtype),
        make((V, T), dtype),
        make((STEPS, N), jnp.float32),
    )


def measure(N: int, V: int, H: int, T: int, *, dtype, chunk: int, repeats: int) -> tuple:
    """A row of `HEADER`."""
    keys = iter(jax.random.split(jax.random.key(0), 5))
    normal = lambda shape, dtype: jax.random.normal(next(keys), shape, dtype) * shape[-1] ** -0.5
    *inputs, _ = shapes(normal, N, V, H, T, dtype)
    supervised_N = jax.random.uniform(jax.random.key(1), (N,)) < 0.75
    inputs.append(jnp.broadcast_to(supervised_N / N, (STEPS, N)))

    def side(loss):
        compiled = gradients(loss).lower(*inputs).compile()
        run = lambda: timed(lambda: jax.block_until_ready(compiled(*inputs)))
        run()
        return run, compiled.memory_analysis().temp_size_in_bytes / 2**20

    (ours, size), (dense, dense_size) = side(fused(chunk)), side(dense_cross_entropy)
    pairs, on_gpu = alternate(ours, dense, repeats), jax.default_backend() == "gpu"
    by_clock, by_cpu = speedup(pairs)
    times = [1e3 * min(pair[i].wall for pair in pairs) if on_gpu else None for i in range(2)]
    return (N, V, by_clock, None if on_gpu else by_cpu, size, dense_size, *times)


def main(argv: list[str]) -> None:
    on_gpu = jax.default_backend() == "gpu"
    widths, default = ((2560, 4096), [4096]) if on_gpu else ((256, 512), [512, 1024])
    parser = benchmark_parser("loss", __doc__)
    parser.add_argument("--positions", type=int, nargs="+", default=default, metavar="N", help=f"(default: {default})")
    vocabularies = [151936] if on_gpu else [16384, 32768]
    parser.add_argument(
        "--vocabularies", type=int, nargs="+", default=vocabularies, metavar="V", help=f"(default: {vocabularies})"
    )
    parser.add_argument("--chunk", type=int, default=512, metavar="C", help="positions at a time (default: 512)")
    parser.add_argument("--repeats", type=int, default=5, metavar="N", help="pairs of runs (default: 5)")
    options = parser.parse_args(argv)
    if min(*options.positions, *options.vocabularies, options.chunk, options.repeats) < 1:
        parser.error("positions, vocabularies, chunk and repeats are positive")
    same = {"dtype": jnp.bfloat16 if on_gpu else jnp.float32, "chunk": options.chunk, "repeats": options.repeats}
    rows = [measure(N, V, *widths, **same) for N in options.positions for V in options.vocabularies]
    print(console_table(HEADER, rows))
