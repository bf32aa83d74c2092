"""One unroll's attention, forward and backward, by our kernels and as whole matrices of scores, at several lengths.

On a GPU in bfloat16 and with the heads of Qwen3-4B, elsewhere in float32 and with small ones. The two sides take turns;
temporaries are what the compiler reserves beside inputs and gradients.
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp

from osprey_jax.benchmark.timing import alternate, benchmark_parser, speedup, timed
from osprey_jax.kernels.attention import Attend, choose_kernel
from osprey_jax.kernels.ttt_attention import attend_unroll
from osprey_jax.reports.tables import console_table

HEADER = ("S", "kernel", "dense / ours", "by CPU time", "ours, MiB", "dense, MiB", "ours, ms", "dense, ms")


def dense_attention(q, k0, v0, diagonal, segment_ids_BxS) -> jax.Array:
    """What `ttt_attention` computes, as one (B, N, S, S) matrix of scores that JAX differentiates."""
    S, N, h = q.shape[1:]
    wide = jnp.promote_types(q.dtype, jnp.float32)
    heads = lambda x: jnp.repeat(x, N // x.shape[2], axis=2)
    index = jnp.arange(S)
    seen_BxSxS = (index <= index[:, None]) & (segment_ids_BxS[:, None] == segment_ids_BxS[:, :, None])
    scores_BxNxSxS = jnp.einsum("bqnh,bknh->bnqk", q, heads(k0), preferred_element_type=wide)
    scores_BxNxSxS = jnp.where(seen_BxSxS[:, None], scores_BxNxSxS, -jnp.inf)
    later = [jnp.sum(q.astype(wide) * heads(k), axis=-1).swapaxes(1, 2)[..., None] for k, _ in diagonal]
    weights = jax.nn.softmax(jnp.concatenate([scores_BxNxSxS, *later], axis=-1) * h**-0.5, axis=-1)
    out = jnp.einsum("bnqk,bknh->bqnh", weights[..., :S].astype(q.dtype), heads(v0), preferred_element_type=wide)
    for i, (_, v) in enumerate(diagonal):
        out += weights[..., S + i].swapaxes(1, 2)[..., None] * heads(v)
    return out.astype(q.dtype)


def dense_unroll(segment_ids_BxS: jax.Array) -> Attend:
    def attend(q, k, v, memory):
        memory = (*memory, (k, v))
        return dense_attention(q, *memory[0], memory[1:], segment_ids_BxS), memory

    return attend


def unroll_gradients(unroll: Callable[[jax.Array], Attend]) -> Callable:
    """Jitted (queries, keys, values: one array a step each; segment_ids) -> (sum of squares, gradients)."""

    def loss(queries, keys, values, segment_ids_BxS):
        attend, memory, total = unroll(segment_ids_BxS), (), 0.0
        for q, k, v in zip(queries, keys, values, strict=True):
            out, memory = attend(q, k, v, memory)
            total += jnp.sum(out.astype(jnp.float32) ** 2)
        return total

    return jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2)))


def unroll_inputs(make: Callable, S: int, N: int, G: int, h: int, steps: int = 5) -> tuple:
    """Queries, keys and values of an unroll of one row; `make(shape)` makes each."""
    return tuple(tuple(make((1, S, heads, h)) for _ in range(steps)) for heads in (N, G, G))


def measure(S: int, N: int, G: int, h: int, *, dtype, kernels: list[str], segments: int, repeats: int) -> list[tuple]:
    """A row of `HEADER` for each kernel."""
    keys = iter(jax.random.split(jax.random.key(0), 15))
    arrays = unroll_inputs(lambda shape: jax.random.normal(next(keys), shape, dtype), S, N, G, h)
    inputs = (*arrays, 1 + jnp.arange(S)[None] * segments // S)

    def side(unroll):
        compiled = unroll_gradients(unroll).lower(*inputs).compile()
        run = lambda: timed(lambda: jax.block_until_ready(compiled(*inputs)))
        run()
        return run, compiled.memory_analysis().temp_size_in_bytes / 2**20

    dense, dense_size = side(dense_unroll)
    rows, on_gpu = [], jax.default_backend() == "gpu"
    for kernel in kernels:
        ours, size = side(partial(attend_unroll, kernel=kernel))
        pairs = alternate(ours, dense, repeats)
        by_clock, by_cpu = speedup(pairs)
        times = [1e3 * min(pair[i].wall for pair in pairs) if on_gpu else None for i in range(2)]
        rows.append((S, kernel, by_clock, None if on_gpu else by_cpu, size, dense_size, *times))
    return rows


def main(argv: list[str]) -> None:
    on_gpu = jax.default_backend() == "gpu"
    heads, lengths = ((32, 8, 128), [1024, 2048, 4096]) if on_gpu else ((8, 4, 32), [512, 1024, 2048])
    parser = benchmark_parser("attention", __doc__)
    parser.add_argument("--lengths", type=int, nargs="+", default=lengths, metavar="S", help=f"(default: {lengths})")
    parser.add_argument("--segments", type=int, default=1, metavar="N", help="of equal length in a row (default: 1)")
    parser.add_argument("--repeats", type=int, default=5, metavar="N", help="pairs of runs (default: 5)")
    options = parser.parse_args(argv)
    if min(*options.lengths, options.segments, options.repeats) < 1:
        parser.error("lengths, segments and repeats are positive")
    dtype = jnp.bfloat16 if on_gpu else jnp.float32
    best = choose_kernel("auto", device=jax.devices()[0], dtype=dtype, head_dim=heads[2])
    same = {"dtype": dtype, "kernels": sorted({best, "xla"}), "segments": options.segments, "repeats": options.repeats}
    print(console_table(HEADER, [row for S in options.lengths for row in measure(S, *heads, **same)]))
