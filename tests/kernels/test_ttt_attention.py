"""Attention of the unroll against a dense form, and what it costs in memory."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from osprey_jax.benchmark.attention import dense_attention, unroll_gradients, unroll_inputs
from osprey_jax.kernels.attention import segment_starts
from osprey_jax.kernels.ttt_attention import attend_unroll, ttt_attention
from tests.kernels.rows import normal, packed_rows
from tests.objectives.cases import relative


def inputs(S, N, G, h, later, seed=1):
    """(q, k0, v0, diagonal), a cotangent, segment ids."""
    rng = np.random.default_rng(seed)
    draw = lambda heads: normal(rng, 2, S, heads, h, scale=1.5)
    return (draw(N), draw(G), draw(G), tuple((draw(G), draw(G)) for _ in range(later))), draw(N), packed_rows(S, rng)


def attend(arrays, segments):
    return ttt_attention(*arrays, segment_starts(segments), "xla")


@pytest.mark.parametrize("later", range(5))
@pytest.mark.parametrize(("S", "N", "G"), [(13, 4, 4), (13, 6, 2), (300, 4, 1)])
def test_against_the_dense_form(S, N, G, later):
    """Values and the gradient of every array: queries, keys and values of step 0 and of each later step."""
    arrays, cotangent, segments = inputs(S, N, G, 4, later)
    actual, vjp = jax.vjp(lambda *x: attend(x, segments), *arrays)
    expected, dense_vjp = jax.vjp(lambda *x: dense_attention(*x, segments), *arrays)
    assert relative(actual, expected) < 1e-5
    for a, b in zip(jax.tree.leaves(vjp(cotangent)), jax.tree.leaves(dense_vjp(cotangent)), strict=True):
        assert relative(a, b) < 1e-5


def test_gradient_against_finite_differences():
    """Of all arrays along random directions, with the dense form in float64: independent of any autodiff."""
    arrays, cotangent, segments = inputs(13, 6, 2, 4, 2)
    grads = jax.grad(lambda x: jnp.sum(attend(x, segments) * cotangent))(arrays)
    leaves, tree = jax.tree.flatten(arrays)
    for i, grad in enumerate(jax.tree.leaves(grads)):
        direction = np.random.default_rng(i).normal(size=grad.shape)
        sums = []
        with jax.enable_x64(True):
            for sign in (1, -1):
                moved = [np.asarray(x, np.float64) for x in leaves]
                moved[i] = moved[i] + sign * 1e-5 * direction
                out = dense_attention(*jax.tree.unflatten(tree, moved), segments)
                sums.append(float(jnp.sum(out * np.asarray(cotangent, np.float64))))
        np.testing.assert_allclose(np.sum(grad * direction), (sums[0] - sums[1]) / 2e-5, rtol=1e-4)


def test_diagonal_logits_that_dwarf_the_others():
    """The merged maximum is then a later step's: no overflow, and the keys of step 0 keep their gradient of zero."""
    (q, k0, v0, diagonal), cotangent, segments = inputs(20, 4, 2, 4, 2)
    arrays = (q, k0, v0, ((diagonal[0][0] + 1e4 * q[:, :, ::2], diagonal[0][1]), diagonal[1]))
    out, vjp = jax.vjp(lambda *x: attend(x, segments), *arrays)
    assert relative(out, dense_attention(*arrays, segments)) < 1e-5
    assert all(np.all(np.isfinite(x)) for x in jax.tree.leaves(vjp(cotangent)))


def test_the_memory_grows_by_one_entry_a_step():
    """Step 0 is causal, each later step adds its own key at p: what the unroll hands from step to step."""
    arrays, _, segments = inputs(13, 4, 2, 4, 2)
    q, k0, v0, diagonal = arrays
    unroll, memory = attend_unroll(segments), ()
    for step, (k, v) in enumerate([(k0, v0), *diagonal]):
        out, memory = unroll(q, k, v, memory)
        assert len(memory) == step + 1
        assert relative(out, dense_attention(q, k0, v0, diagonal[:step], segments)) < 1e-5


def test_bfloat16_keeps_its_softmax_in_float32():
    """Outputs and gradients in the inputs' dtype, as near to the float32 ones as bfloat16's products allow."""
    arrays, cotangent, segments = inputs(40, 4, 2, 16, 2)
    halves, half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), (arrays, cotangent))
    widened = jax.tree.map(lambda x: x.astype(jnp.float32), halves)
    actual, vjp = jax.vjp(lambda *x: attend(x, segments), *halves)
    expected, dense_vjp = jax.vjp(lambda *x: dense_attention(*x, segments), *widened)
    pairs = zip(
        jax.tree.leaves((actual, vjp(half))),
        jax.tree.leaves((expected, dense_vjp(half.astype(jnp.float32)))),
        strict=True,
    )
    for a, b in pairs:
        assert a.dtype == jnp.bfloat16
        assert relative(a.astype(jnp.float32), b) < 0.02


def test_memory_is_linear_in_the_sequence():
    """Temporaries of the five steps and their gradients at 8192 against 4096: 2 times, not 4."""
    temporaries = []
    for S in (4096, 8192):
        arrays = unroll_inputs(lambda shape: jax.ShapeDtypeStruct(shape, jnp.float32), S, 8, 2, 32)
        compiled = unroll_gradients(attend_unroll).lower(*arrays, jnp.ones((1, S), jnp.int32)).compile()
        temporaries.append(compiled.memory_analysis().temp_size_in_bytes)
    assert temporaries[1] < 2.1 * temporaries[0]
