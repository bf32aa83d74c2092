"""Blockwise causal flash attention in plain XLA, for any device: memory linear in S.

Walks pairs of a block of queries and a block of keys with the softmax's running maximum and sum (arXiv:2205.14135),
leaves out what lies above the diagonal or before the block's first segment, and computes probabilities again in the
backward pass. Arguments and results as `flash_forward` and `flash_backward` in `attention.py`.

Axes: B batch, S sequence, N query heads, G key/value heads, M = N / G, h head size; J number of blocks, Q positions of
a block, R = Q * M rows of a block (the M query heads of a position and key/value head side by side).
"""

import jax
import jax.numpy as jnp

_BLOCK = 256  # positions: scores of a pair of blocks, (B, N, Q, Q) in float32, exist at one time
_MASKED = -1e30  # finite: a row that sees nothing of a block gives no NaN


def forward(q_BxSxNxh, k_BxSxGxh, v_BxSxGxh, start_BxS):
    B, S, N, h = q_BxSxNxh.shape
    size, G, dtype = _block_size(S), k_BxSxGxh.shape[2], v_BxSxGxh.dtype
    q, k, v = (_heads_to_blocks(x, G, size) for x in (q_BxSxNxh, k_BxSxGxh, v_BxSxGxh))
    start_JxBxR = _rows_of_positions(start_BxS, N // G, size)
    J, _, _, R, _ = q.shape

    def query_block(i):
        def add_keys(j, carry):
            out_BxGxRxh, max_BxGxR, sum_BxGxR = carry
            scores_BxGxRxQ = _scores(q[i], k[j], start_JxBxR[i], i, j)
            new_max_BxGxR = jnp.maximum(max_BxGxR, scores_BxGxRxQ.max(axis=-1))
            weights_BxGxRxQ = jnp.exp(scores_BxGxRxQ - new_max_BxGxR[..., None])
            shrink_BxGxR = jnp.exp(max_BxGxR - new_max_BxGxR)
            values_BxGxRxh = _product("bgrq,bgqh->bgrh", weights_BxGxRxQ.astype(dtype), v[j])
            out_BxGxRxh = out_BxGxRxh * shrink_BxGxR[..., None] + values_BxGxRxh
            return out_BxGxRxh, new_max_BxGxR, sum_BxGxR * shrink_BxGxR + weights_BxGxRxQ.sum(axis=-1)

        start = (jnp.zeros((B, G, R, h), jnp.float32), jnp.full((B, G, R), _MASKED), jnp.zeros((B, G, R), jnp.float32))
        out, max_, sum_ = jax.lax.fori_loop(start_JxBxR[i].min() // size, i + 1, add_keys, start)
        return (out / sum_[..., None]).astype(q.dtype), max_, sum_

    out, max_, sum_ = jax.lax.map(query_block, jnp.arange(J))
    positions_last = lambda x_JxBxGxR: jnp.moveaxis(_blocks_to_heads(x_JxBxGxR[..., None], S, N)[..., 0], 1, 2)
    return _blocks_to_heads(out, S, N), (positions_last(max_), positions_last(sum_))


def backward(q_BxSxNxh, k_BxSxGxh, v_BxSxGxh, start_BxS, out_BxSxNxh, residuals, dout_BxSxNxh):
    B, S, N, h = q_BxSxNxh.shape
    size, G, dtype = _block_size(S), k_BxSxGxh.shape[2], q_BxSxNxh.dtype
    q, k, v, dout = (_heads_to_blocks(x, G, size) for x in (q_BxSxNxh, k_BxSxGxh, v_BxSxGxh, dout_BxSxNxh))
    start_JxBxR = _rows_of_positions(start_BxS, N // G, size)
    delta_BxSxN = jnp.sum(out_BxSxNxh.astype(jnp.float32) * dout_BxSxNxh.astype(jnp.float32), axis=-1)
    max_BxNxS, sum_BxNxS = residuals
    # Rows that pad the last block have no gradient, since their `dout` is zero.
    lse_BxSxN = jnp.moveaxis(max_BxNxS + jnp.log(sum_BxNxS), 1, 2)
    lse, delta = (_heads_to_blocks(x[..., None], G, size) for x in (lse_BxSxN, delta_BxSxN))
    J, _, _, R, _ = q.shape

    def query_block(carry, i):
        def add_keys(j, carry):
            dq_BxGxRxh, dk, dv = carry
            weights_BxGxRxQ = jnp.exp(_scores(q[i], k[j], start_JxBxR[i], i, j) - lse[i])
            dweights_BxGxRxQ = _product("bgrh,bgqh->bgrq", dout[i], v[j])
            dscores_BxGxRxQ = (weights_BxGxRxQ * (dweights_BxGxRxQ - delta[i]) * h**-0.5).astype(dtype)
            dq_BxGxRxh += _product("bgrq,bgqh->bgrh", dscores_BxGxRxQ, k[j])
            dk = dk.at[j].add(_product("bgrq,bgrh->bgqh", dscores_BxGxRxQ, q[i]))
            dv = dv.at[j].add(_product("bgrq,bgrh->bgqh", weights_BxGxRxQ.astype(dtype), dout[i]))
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


def _scores(q_BxGxRxh, k_BxGxQxh, start_BxR, i, j) -> jax.Array:
    """Logits (B, G, R, Q) of query block i against key block j, float32, where R holds Q * M rows."""
    R, Q = start_BxR.shape[1], k_BxGxQxh.shape[2]
    index_R, key_Q = i * Q + jnp.arange(R) // (R // Q), j * Q + jnp.arange(Q)
    seen_BxRxQ = (key_Q <= index_R[:, None]) & (key_Q >= start_BxR[..., None])
    scores_BxGxRxQ = _product("bgrh,bgqh->bgrq", q_BxGxRxh, k_BxGxQxh) * q_BxGxRxh.shape[-1] ** -0.5
    return jnp.where(seen_BxRxQ[:, None], scores_BxGxRxQ, _MASKED)


def _product(subscripts: str, x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.einsum(subscripts, x, y, preferred_element_type=jnp.float32)


def _block_size(S: int) -> int:
    """As even as blocks of at most `_BLOCK` can be."""
    blocks = -(-S // _BLOCK)
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
