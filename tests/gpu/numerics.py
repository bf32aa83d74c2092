"""Both kernels in bfloat16 beside float32 references that are written down as formulas.

Axes: B rows, S sequence, N query heads, G key/value heads, h head size, K steps of the unroll, P positions, H student
width, T teacher width, V vocabulary.
"""

import functools

import jax
import jax.numpy as jnp

from osprey_jax.benchmark.random_run import random_batch
from osprey_jax.command import UserError
from osprey_jax.kernels.attention import attend_rows, choose_kernel
from osprey_jax.kernels.soft_cross_entropy import soft_cross_entropy
from osprey_jax.kernels.ttt_attention import attend_unroll

# Norm of the difference over norm of the reference. A bfloat16 has 8 bits: a result that is rounded once is off by
# 0.002; attention rounds its weights too, and a gradient is a product of three such factors.
TOLERANCE = {"out": 0.01, "gradient": 0.02, "loss": 0.001}


def attention_errors(kernel: str, *, steps: int, length: int, heads: int, kv_heads: int, head_dim: int) -> dict:
    """{"out": ..., "gradient": ...}: of the target's attention (`steps` 0) or of the unroll's last step."""
    segments = jnp.asarray(random_batch(rows=2, length=length, vocab=2, segment=length // 3)["segment_ids"])
    keys = iter(jax.random.split(jax.random.key(0), 3 * max(steps, 1) + 1))
    random = lambda n: jax.random.normal(next(keys), (2, length, n, head_dim), jnp.bfloat16)
    inputs = [(random(heads), random(kv_heads), random(kv_heads)) for _ in range(max(steps, 1))]
    weight = random(heads).astype(jnp.float32)

    def last(attend, inputs):
        memory = ()
        for qkv in inputs:
            out, memory = attend(*qkv, memory)
        return out

    def value_and_gradients(attend, inputs):
        loss = lambda inputs: (jnp.sum(weight * (out := last(attend, inputs))), out)
        gradients, out = jax.jit(jax.grad(loss, has_aux=True))(inputs)
        return out, gradients

    ours = (attend_unroll if steps else attend_rows)(segments, kernel)
    out, gradients = value_and_gradients(ours, inputs)
    with jax.default_matmul_precision("highest"):
        exact = jax.tree.map(lambda x: x.astype(jnp.float32), inputs)
        exact_out, exact_gradients = value_and_gradients(functools.partial(dense, segments), exact)
    pairs = list(zip(jax.tree.leaves(gradients), jax.tree.leaves(exact_gradients), strict=True))
    if any(jnp.any(a) for a, b in pairs if not jnp.any(b)):
        raise ValueError("a gradient that is zero in the reference is not")
    return {"out": error(out, exact_out), "gradient": max(error(a, b) for a, b in pairs if jnp.any(b))}


def dense(segments_BxS, q_BxSxNxh, k_BxSxGxh, v_BxSxGxh, memory):
    """Attention with all scores in memory: the keys of step 0 up to p, and of each later step the one at p."""
    S, repeats = q_BxSxNxh.shape[1], q_BxSxNxh.shape[2] // k_BxSxGxh.shape[2]
    memory = (*memory, tuple(jnp.repeat(x, repeats, axis=2) for x in (k_BxSxGxh, v_BxSxGxh)))
    (k0, v0), later = memory[0], memory[1:]
    scale = q_BxSxNxh.shape[-1] ** -0.5
    seen_BxSxS = jnp.tril(jnp.ones((S, S), bool)) & (segments_BxS[:, :, None] == segments_BxS[:, None])
    scores_BxNxSxS = jnp.where(seen_BxSxS[:, None], jnp.einsum("bqnh,bsnh->bnqs", q_BxSxNxh, k0) * scale, -jnp.inf)
    diagonal = [jnp.einsum("bqnh,bqnh->bnq", q_BxSxNxh, k)[..., None] * scale for k, _ in later]
    weights = jax.nn.softmax(jnp.concatenate([scores_BxNxSxS, *diagonal], axis=-1), axis=-1)
    out = jnp.einsum("bnqs,bsnh->bqnh", weights[..., :S], v0)
    for i, (_, v) in enumerate(later):
        out += weights[..., S + i].swapaxes(1, 2)[..., None] * v
    return out, memory


def loss_errors(*, steps: int, positions: int, width: int, teacher_width: int, vocab: int, chunk: int) -> dict:
    """{"loss": ..., "gradient": ...} of the fused soft cross-entropy, of hidden states and head."""
    keys = jax.random.split(jax.random.key(1), 5)
    hidden_KxPxH = jax.random.normal(keys[0], (steps, positions, width), jnp.bfloat16)
    # Both sides of the comparison start from what a bfloat16 holds.
    rounded = lambda key, shape: jax.random.normal(key, shape, jnp.bfloat16).astype(jnp.float32) * shape[-1] ** -0.5
    head_VxH = rounded(keys[1], (vocab, width)).astype(jnp.bfloat16).astype(jnp.float32)
    teacher_hidden_PxT = 3 * jax.random.normal(keys[2], (positions, teacher_width), jnp.bfloat16)
    teacher_head_VxT = rounded(keys[3], (vocab, teacher_width)).astype(jnp.bfloat16)
    weight_KxP = (jax.random.uniform(keys[4], (steps, positions)) < 0.75) / positions

    def fused(hidden, head):
        arguments = hidden, head, teacher_hidden_PxT, teacher_head_VxT, weight_KxP
        return soft_cross_entropy(*arguments, chunk=chunk)[0]

    def formula(hidden, head):
        teacher = jax.nn.softmax(teacher_hidden_PxT.astype(jnp.float32) @ teacher_head_VxT.astype(jnp.float32).T)

        def add(loss, step):  # one k at a time, or the reference would not fit
            hidden_PxH, weight_P = step
            log_PxV = jax.nn.log_softmax(hidden_PxH @ head.T)
            return loss - jnp.sum(weight_P * jnp.sum(teacher * log_PxV, axis=-1)), None

        return jax.lax.scan(jax.checkpoint(add), jnp.float32(0), (hidden, weight_KxP))[0]

    run = lambda function, hidden: jax.jit(jax.value_and_grad(function, argnums=(0, 1)))(hidden, head_VxH)
    loss, gradients = run(fused, hidden_KxPxH)
    with jax.default_matmul_precision("highest"):
        exact_loss, exact_gradients = run(formula, hidden_KxPxH.astype(jnp.float32))
    pairs = zip(gradients, exact_gradients, strict=True)
    return {"loss": error(loss, exact_loss), "gradient": max(error(a, b) for a, b in pairs)}


def error(actual, exact) -> float:
    difference = actual.astype(jnp.float32) - exact
    return float(jnp.linalg.norm(difference.ravel()) / jnp.linalg.norm(exact.ravel()))


def check(tiny: bool) -> list[dict]:
    """What was compared: `name`, `errors`, `ok`; a kernel that cannot run here has `skipped`, why, instead."""
    heads = {"heads": 4, "kv_heads": 2, "head_dim": 64} if tiny else {"heads": 32, "kv_heads": 8, "head_dim": 128}
    length, device, found = 256 if tiny else 2048, jax.devices()[0], []
    for kernel in ("mosaic", "xla"):
        try:
            choose_kernel(kernel, device=device, dtype=jnp.dtype("bfloat16"), head_dim=heads["head_dim"])
        except UserError as refusal:
            found.append({"name": f"attention, {kernel}", "skipped": str(refusal)})
            continue
        for steps, what in ((0, "target"), (3, "unroll")):
            errors = attention_errors(kernel, steps=steps, length=length, **heads)
            found.append({"name": f"attention of the {what}, {kernel}", "errors": errors})
    sizes = {"steps": 5, "positions": 96, "width": 64, "teacher_width": 128, "vocab": 500, "chunk": 32}
    real = {"steps": 5, "positions": 4096, "width": 2560, "teacher_width": 4096, "vocab": 151936, "chunk": 512}
    found.append({"name": "soft cross-entropy", "errors": loss_errors(**(sizes if tiny else real))})
    for item in found:
        if "errors" in item:
            item["ok"] = all(value < TOLERANCE[name] for name, value in item["errors"].items())
    return found
