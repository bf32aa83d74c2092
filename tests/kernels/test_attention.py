"""Row attention in blocks of queries against one block."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from osprey_jax.kernels.attention import attend_rows, by_query_blocks
from tests.objectives.cases import relative

B, S, N, G, H = 2, 13, 6, 2, 4
SEGMENTS = np.array([[1] * 6 + [2] * 7, [1] * 9 + [0] * 4], np.int32)


def inputs():
    rng = np.random.default_rng(0)
    return tuple(rng.normal(size=(B, S, heads, H)).astype(np.float32) for heads in (N, G, G))


@pytest.mark.parametrize("size", [1, 5, 13])
def test_blocks_change_nothing(size):
    """Values and gradients, also where the last block is part padding."""
    q, k, v = inputs()

    def loss(q, k, v, size):
        block = lambda q, mask: jax.nn.dot_product_attention(q, k, v, mask=mask[:, None])
        return jnp.sum(jnp.sin(by_query_blocks(block, q, SEGMENTS, size)))

    actual = jax.value_and_grad(loss, argnums=(0, 1, 2))(q, k, v, size)
    expected = jax.value_and_grad(loss, argnums=(0, 1, 2))(q, k, v, S)
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert relative(a, b) < 1e-5


def test_a_query_sees_its_segment_so_far():
    """No later key, and none of another segment: by gradients, position by position."""
    q, k, v = inputs()
    for p in range(S):
        grad = jax.grad(lambda v, p=p: jnp.sum(attend_rows(SEGMENTS)(q, k, v, None)[0][:, p]))(v)
        seen = np.abs(np.asarray(grad)).sum(axis=(2, 3)) > 0
        expected = (np.arange(S) <= p) & (SEGMENTS[:, p : p + 1] == SEGMENTS)
        np.testing.assert_array_equal(seen, expected)
