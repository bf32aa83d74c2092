"""tokamax's flash attention for NVIDIA GPUs (Pallas, Mosaic GPU); the one file that knows tokamax.

Its backward pass with given residuals is not part of its public interface, hence the exact version. Axes, arguments and
results as of `flash_forward` and `flash_backward` in `attention.py`; any sequence length.
"""

import contextlib
import functools
import importlib.metadata

import jax
import jax.numpy as jnp

VERSION = "0.0.17"
_LARGEST_HEAD = {"9.0": 256, "10.0": 192}  # by compute capability: what its kernels take, found by compiling them


def unmet(device: jax.Device, dtype: jnp.dtype, head_dim: int) -> str | None:
    """What the kernel would need and does not find, the end of "mosaic needs ..."; None where it can run."""
    capability = str(getattr(device, "compute_capability", None))
    if capability not in _LARGEST_HEAD:
        found = f"a GPU of {capability}" if device.platform == "gpu" else f"the platform {device.platform}"
        return f"a GPU of compute capability {' or '.join(_LARGEST_HEAD)} (H100, H200, B200), not {found}"
    if jnp.dtype(dtype) != jnp.bfloat16:
        return f"compute_dtype bfloat16, not {jnp.dtype(dtype).name}"
    if head_dim > _LARGEST_HEAD[capability]:
        return f"heads of size {_LARGEST_HEAD[capability]} or less on this GPU, not {head_dim}"
    if (installed := _installed()) != VERSION:
        found = "it is not installed" if installed is None else f"found {installed}"
        return f"tokamax {VERSION}, {found} (pip install tokamax=={VERSION}, Python 3.12 or later)"
    return None


def without_gpu() -> contextlib.AbstractContextManager:
    """Where a step is lowered for GPUs on a machine that has none; `jax.default_device` says for which."""
    if _installed() is None:
        return contextlib.nullcontext()
    from tokamax import config

    return config.cross_compile(True)


def forward(q_BxSxNxh, k_BxSxGxh, v_BxSxGxh, start_BxS):
    arrays = (q_BxSxNxh, k_BxSxGxh, v_BxSxGxh)
    options = {"mask": _mask(start_BxS), "logits_scale": q_BxSxNxh.shape[-1] ** -0.5, "return_residuals": True}
    return _call(_operation(), *arrays, **options)


def backward(q_BxSxNxh, k_BxSxGxh, v_BxSxGxh, start_BxS, out_BxSxNxh, residuals, dout_BxSxNxh):
    gradients = _call(
        _operation().vjp,
        residuals,
        out_BxSxNxh,
        dout_BxSxNxh,
        q_BxSxNxh,
        k_BxSxGxh,
        v_BxSxGxh,
        mask=_mask(start_BxS),
        logits_scale=q_BxSxNxh.shape[-1] ** -0.5,
        logits_dtype=jnp.dtype(jnp.float32),
        precision=(jax.lax.DotAlgorithmPreset.DEFAULT,) * 2,
        normalize_output=True,
        dropout_rate=0.0,
        **dict.fromkeys(("bias", "logits_soft_cap", "dropout_mask", "paging_info", "q_indices", "k_indices")),
    )
    return gradients["q"], gradients["k"], gradients["v"]


def _call(operation, *arguments, **options):
    """With block sizes by its rule of thumb: its table of measured ones lacks these masks and warns at every look."""
    rule = operation.bind(*arguments, **options).heuristics_config
    return operation.replace(config=rule)(*arguments, **options)


def _operation():
    from tokamax._src.ops.attention.pallas_mosaic_gpu import PallasMosaicGpuFlashAttention

    return PallasMosaicGpuFlashAttention()


def _mask(start_BxS: jax.Array):
    from tokamax._src.ops.attention.base import Mask

    return Mask(is_causal=True, k_start=start_BxS[:, None])


@functools.cache
def _installed() -> str | None:
    try:
        return importlib.metadata.version("tokamax")
    except importlib.metadata.PackageNotFoundError:
        return None
