"""Blockwise causal flash attention in plain XLA, for any device: memory linear in S.

Walks pairs of a block of queries and a block of keys with the softmax's running maximum and sum (arXiv:2205.14135),
leaves out what lies above the diagonal or before the block's first segment, and computes probabilities again in the
backward pass. Arguments and results as `flash_forward` and `flash_backward` in `attention.py`.

Axes: B batch, S sequence, N query heads, G key/value heads, M = N / G, h head size; J number of blocks, Q positions of
a block, R = Q * M rows of a block (the M query heads of a position and key/value head side by side).
"""

import jax
import jax.numpy as jnp

_MASKED = -1e30  # finite: a row that sees nothing of a block gives no NaN


def forward(q_BxSxNxh, k_BxSxGxh, v_BxSxGxh, start_BxS):
    B, S, N, h = q_BxSxNxh.shape
    size, G, dtype = _block_size(S, h), k_BxSxGxh.shape[2], v_BxSxGxh.dtype
    q, k, v = (_heads_to_blocks(x, G, size) for x in (q_BxSxNxh, k_BxSxGxh, v_BxSxGxh))
    start_JxBxR = _rows_of_positions(start_BxS, N // G, size)
    J, _, _, R, _ = q.shape

    def query_block(i):
        def add_keys(j, carry):
            out_BxGxRxh, max_BxGxR, sum_BxGxR = carry
            seen_BxRxQ = _seen(start_JxBxR[i], i, j, size)
            scores_BxGxRxQ = _product("bgrh,bgqh->bgrq", q[i], k[j]) * h**-0.5
            scores_BxGxRxQ = jnp.where(seen_BxRxQ[:, None], scores_BxGxRxQ, _MASKED)
            new_max_BxGxR = jnp.maximum(max_BxGxR, scores_BxGxRxQ.max(axis=-1))
            weights_BxGxRxQ = jnp.exp(scores_BxGxRxQ - new_max_BxGxR[..., None])
            shrink_BxGxR = jnp.exp(max_BxGxR - new_max_BxGxR)
            values_BxGxRxh = _product("bgrq,bgqh->bgrh", weights_BxGxRxQ.astype(dtype), v[j])
            out_BxGxRxh = out_BxGxRxh * shrink_BxGxR[..., None] + values_BxGxRxh
            return out_BxGxRxh, new_max_BxGxR, sum_BxGxR * shrink_BxGxR + weights_BxGxRxQ.sum(axis=-1)

        start = (
            jnp.zeros((B, G, R, h), jnp.float32),
            jnp.full((B, G, R), _MASKED, jnp.float32),
            jnp.zeros((B, G, R), jnp.float32),
        )
        out, max_, sum_ = jax.lax.fori_loop(start_JxBxR[i].min() // size, i + 1, add_keys, start)
        return (out / sum_[..., None]).astype(q.dtype), max_, sum_

    out, max_, sum_ = jax.lax.map(query_block, jnp.arange(J))
    positions_last = lambda x_JxBxGxR: jnp.moveaxis(_blocks_to_heads(x_JxBxGxR[..., None], S, N)[..., 0], 1, 2)
    return _blocks_to_heads(out, S, N), (positions_last(max_), positions_last(sum_))


def backward(q_BxSxNxh, k_BxSxGxh, v_BxSxGxh, start_BxS, out_BxSxNxh, residuals, dout_BxSxNxh):
    B, S, N, h = q_BxSxNxh.shape
    size, G, dtype = _block_size(S, h), k_BxSxGxh.shape[2], q_BxSxNxh.dtype
    q, k, v, dout = (_heads_to_blocks(x, G, size) for x in (q_BxSxNxh, k_BxSxGxh, v_BxSxGxh, dout_BxSxNxh))
    start_JxBxR = _rows_of_positions(start_BxS, N // G, size)
    delta_BxSxN = jnp.sum(out_BxSxNxh.astype(jnp.float32) * dout_BxSxNxh.astype(jnp.float32), axis=-1)
    max_BxNxS, sum_BxNxS = residuals
    # Rows that pad the last block have no gradient, since their `dout` is zero.
    lse_BxSxN = jnp.moveaxis(max_BxNxS + jnp.log(sum_BxNxS), 1, 2)
    lse, delta = (_heads_to_blocks(x[..., None], G, size).swapaxes(3, 4) for x in (lse_BxSxN, delta_BxSxN))
    J, _, _, R, _ = q.shape

    def query_block(carry, i):
        # Keys before queries: of the products, only dq then contracts the rows of both factors, which CPUs are slow at.
        def add_keys(j, carry):
            dq_BxGxRxh, dk, dv = carry
            seen_BxQxR = _seen(start_JxBxR[i], i, j, size).swapaxes(1, 2)
            scores_BxGxQxR = _product("bgqh,bgrh->bgqr", k[j], q[i]) * h**-0.5
            weights_BxGxQxR = jnp.where(seen_BxQxR[:, None], jnp.exp(scores_BxGxQxR - lse[i]), 0)
            dweights_BxGxQxR = _product("bgqh,bgrh->bgqr", v[j], dout[i])
            dscores_BxGxQxR = (weights_BxGxQxR * (dweights_BxGxQxR - delta[i]) * h**-0.5).astype(dtype)
            dq_BxGxRxh += _product("bgqr,bgqh->bgrh", dscores_BxGxQxR, k[j])
            dk = dk.at[j].add(_product("bgqr,bgrh->bgqh", dscores_BxGxQxR, q[i]))
            dv = dv.at[j].add(_product("bgqr,bgrh->bgqh", weights_BxGxQxR.astype(dtype), dout[i]))
            return dq_BxGxRxh, dk, dv

        start = (jnp.zeros((B, G, R, h), jnp.float32), *carry)
        dq, *carry = jax.lax.fori_loop(start_JxBxR[i].min() // size, i + 1, add_keys, start)
        return tuple(carry), dq.astype(dtype)

    zeros_JxBxGxQxh = jnp.zeros(k.shape, jnp.float32)
    (dk, dv), dq = jax.lax.scan(query_block, (zeros_JxBxGxQxh, zeros_JxBxGxQxh), jnp.arange(J))
    return (
        _blocks_to_heads(dq, S, N),
        _blocks_to_heads(dk, S, G).astype(k_BxSxGxh.dtype),
        _blocks_to_heads(dv, S, G).astype(v_BxSxGxh.dtype),
    )


def _seen(start_BxR: jax.Array, i: jax.Array, j: jax.Array, size: int) -> jax.Array:
    """Which keys of block j a row of query block i sees, bool (B, R, Q)."""
    R = start_BxR.shape[1]
    index_R, key_Q = i * size + jnp.arange(R) // (R // size), j * size + jnp.arange(size)
    return (key_Q <= index_R[:, None]) & (key_Q >= start_BxR[..., None])


def _product(subscripts: str, x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.einsum(subscripts, x, y, preferred_element_type=jnp.float32)


def _block_size(S: int, h: int) -> int:
    """Positions: as even as blocks can be. Scores of a pair of blocks, (B, N, Q, Q) in float32, exist at one time."""
    largest = 256 if h >= 64 else 128  # the faster on CPUs
    blocks = -(-S // largest)
    return -(-S // blocks)


def _heads_to_blocks(x_BxSxNxd: jax.Array, G: int, size: int) -> jax.Array:
    """(J, B, G, size * M, d): S in blocks of `size`, zeros behind its end, the N heads in G groups of M."""
    B, S, N, d = x_BxSxNxd.shape
    J = -(-S // size)
    x = jnp.pad(x_BxSxNxd, ((0, 0), (0, J * size - S), (0, 0), (0, 0)))
    return x.reshape(B, J, size, G, N // G, d).transpose(1, 0, 3, 2, 4, 5).reshape(J, B, G, size * (N // G), d)


def _blocks_to_heads(x_JxBxGxRxd: jax.Array, S: int, N: int) -> jax.Array:
    """`_heads_to_blocks` undone: (B, S, N, d)."""
    J, B, G, R, d = x_JxBxGxRxd.shape
    size = R * G // N
    x = x_JxBxGxRxd.reshape(J, B, G, size, N // G, d).transpose(1, 0, 3, 2, 4, 5)
    return x.reshape(B, J * size, N, d)[:, :S]


def _rows_of_positions(x_BxS: jax.Array, M: int, size: int) -> jax.Array:
    """(J, B, R), each position's value at its M rows. Behind the end: the last value, so that nothing more is seen."""
    B, S = x_BxS.shape
    J = -(-S // size)
    x_JxBxQ = jnp.pad(x_BxS, ((0, 0), (0, J * size - S)), mode="edge").reshape(B, J, size).swapaxes(0, 1)
    return jnp.repeat(x_JxBxQ, M, axis=2)
