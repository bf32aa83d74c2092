"""Attention of the unroll against its definition, written out one query at a time."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from osprey_jax.kernels.ttt_attention import ttt_attention
from tests.objectives.cases import relative

B, S, N, G, H, K = 2, 13, 6, 2, 4, 3


def inputs(dtype=np.float32):
    rng = np.random.default_rng(1)
    q = rng.normal(size=(B, S, N, H)).astype(dtype)
    keys, values = (rng.normal(size=(K, B, S, G, H)).astype(dtype) for _ in range(2))
    segments = np.array([[1] * 6 + [2] * 7, [1] * 9 + [0] * 4], np.int32)
    return q, keys, values, segments


def definition(q, keys, values, segments):
    """A softmax over the keys of step 0 up to p in p's segment, and one key of each later step, in float64."""
    out = np.zeros(q.shape)
    for b in range(B):
        for p in range(S):
            before = [j for j in range(p + 1) if segments[b, j] == segments[b, p]]
            for head in range(N):
                g = head // (N // G)
                k = np.array([keys[0, b, j, g] for j in before] + [keys[i, b, p, g] for i in range(1, K)], np.float64)
                v = np.array(
                    [values[0, b, j, g] for j in before] + [values[i, b, p, g] for i in range(1, K)], np.float64
                )
                scores = k @ q[b, p, head] / np.sqrt(H)
                weights = np.exp(scores - scores.max())
                out[b, p, head] = weights / weights.sum() @ v
    return out


def attend(q, keys, values, segments, query_block=S):
    diagonal = tuple(zip(keys[1:], values[1:], strict=True))
    return ttt_attention(q, keys[0], values[0], diagonal, segments, query_block=query_block)


@pytest.mark.parametrize("query_block", [1, 4, S, 100])
def test_against_the_definition(query_block):
    """Causal within segments, diagonal for later steps, grouped heads; any number of queries at a time."""
    assert relative(attend(*inputs(), query_block), definition(*inputs())) < 1e-5


@pytest.mark.parametrize("query_block", [4, S])
def test_gradient_against_finite_differences(query_block):
    """Of queries, keys and values of every step, along random directions."""
    q, keys, values, segments = inputs()
    cotangent = np.random.default_rng(2).normal(size=q.shape)
    loss = lambda *x: jnp.sum(attend(*x, segments, query_block) * cotangent)
    grads = jax.grad(loss, argnums=(0, 1, 2))(*map(jnp.asarray, (q, keys, values)))
    for argument, grad in enumerate(grads):
        arguments = [x.astype(np.float64) for x in (q, keys, values)]
        direction = np.random.default_rng(3 + argument).normal(size=arguments[argument].shape)
        sums = []
        for sign in (1, -1):
            moved = list(arguments)
            moved[argument] = moved[argument] + sign * 1e-5 * direction
            sums.append(np.sum(definition(*moved, segments) * cotangent))
        numeric = (sums[0] - sums[1]) / 2e-5
        np.testing.assert_allclose(np.sum(grad * direction), numeric, rtol=1e-4)
