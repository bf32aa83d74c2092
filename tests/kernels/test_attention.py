"""Flash attention of whole rows against a dense form, and the choice of its kernel."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from osprey_jax.benchmark.attention import dense_attention
from osprey_jax.command import UserError
from osprey_jax.kernels import blockwise, mosaic
from osprey_jax.kernels.attention import attend_rows, choose_kernel, flash_forward, segment_starts
from tests.kernels.rows import normal, packed_rows
from tests.objectives.cases import relative


def inputs(S, N, G, h, seed=0):
    rng = np.random.default_rng(seed)
    arrays = [normal(rng, 2, S, heads, h) for heads in (N, G, G, N)]
    return arrays[:3], arrays[3], packed_rows(S, rng)


def test_segment_starts():
    """Equal ids that something else lies between are two segments; padding is one like any other."""
    starts = segment_starts(jnp.array([[1, 1, 2, 0, 0, 1, 1], [3, 3, 3, 3, 3, 3, 3]]))
    np.testing.assert_array_equal(starts, [[0, 0, 2, 3, 3, 5, 5], [0] * 7])


@pytest.mark.parametrize("S", [1, 13, 300])
@pytest.mark.parametrize(("N", "G"), [(4, 4), (4, 2), (4, 1)])
def test_rows_against_the_dense_form(S, N, G):
    """Values and gradients: one block, several, padding at the end of the last, any number of heads a group."""
    arrays, cotangent, segments = inputs(S, N, G, 8)
    actual, vjp = jax.vjp(lambda *x: attend_rows(segments)(*x, None)[0], *arrays)
    expected, dense_vjp = jax.vjp(lambda *x: dense_attention(*x, (), segments), *arrays)
    for a, b in zip((actual, *vjp(cotangent)), (expected, *dense_vjp(cotangent)), strict=True):
        assert np.max(np.abs(a - b)) < 2e-6 * max(1, np.max(np.abs(b)))


@pytest.mark.parametrize("size", [1, 4, 7, 32, 33])
def test_blocks_change_nothing(size, monkeypatch):
    """Values, residuals and gradients at any block size, which may leave a rest."""
    (q, k, v), cotangent, segments = inputs(33, 6, 2, 4)
    results = []
    for block in (size, 33):
        monkeypatch.setattr(blockwise, "_block_size", lambda S, h, block=block: block)
        out, residuals = blockwise.forward(q, k, v, segment_starts(segments))
        results.append(blockwise.backward(q, k, v, segment_starts(segments), out, residuals, cotangent))
        results[-1] += (out, *residuals)
    for a, b in zip(*results, strict=True):
        assert relative(a, b) < 1e-5


def test_a_query_sees_its_segment_so_far():
    """No later key, and none of another segment: by gradients, position by position."""
    (q, k, v), _, segments = inputs(13, 6, 2, 4)
    for p in range(13):
        grad = jax.grad(lambda v, p=p: jnp.sum(attend_rows(segments)(q, k, v, None)[0][:, p]))(v)
        seen = np.abs(np.asarray(grad)).sum(axis=(2, 3)) > 0
        np.testing.assert_array_equal(seen, (np.arange(13) <= p) & (segments[:, p : p + 1] == segments))


def test_residuals_are_the_softmax_s():
    """Maximum and sum of exponentials of the scaled logits, in the order that the merge reads them."""
    (q, k, v), _, segments = inputs(13, 4, 2, 8)
    _, (max_BxNxS, sum_BxNxS) = flash_forward(q, k, v, segment_starts(segments), kernel="xla")
    scores = np.einsum("bqnh,bknh->bnqk", q, np.repeat(k, 2, axis=2)) / np.sqrt(8)
    seen = (np.arange(13) <= np.arange(13)[:, None]) & (segments[:, None] == segments[:, :, None])
    scores = np.where(seen[:, None], scores, -np.inf)
    np.testing.assert_allclose(max_BxNxS, scores.max(axis=-1), rtol=1e-5)
    np.testing.assert_allclose(sum_BxNxS, np.exp(scores - scores.max(axis=-1, keepdims=True)).sum(axis=-1), rtol=1e-5)


def test_large_logits():
    """Logits far beyond what float32 can exponentiate give no NaN, neither in values nor in gradients."""
    (q, k, v), cotangent, segments = inputs(40, 4, 2, 8)
    out, vjp = jax.vjp(lambda *x: attend_rows(segments)(*x, None)[0], 1e3 * q, 1e3 * k, v)
    assert relative(out, dense_attention(1e3 * q, 1e3 * k, v, (), segments)) < 1e-5
    assert all(np.all(np.isfinite(x)) for x in vjp(cotangent))


def test_without_gradients_only_the_forward_pass_is_traced():
    """The frozen target pays for no backward pass; the names are what a counter of FLOPs knows the kernel by."""
    (q, k, v), _, segments = inputs(13, 4, 2, 8)
    attend = lambda *x: attend_rows(segments)(*x, None)[0]
    assert "name=flash_forward" in (forward := str(jax.make_jaxpr(attend)(q, k, v)))
    assert "name=flash_backward" not in forward
    gradient = str(jax.make_jaxpr(jax.grad(lambda *x: jnp.sum(attend(*x))))(q, k, v))
    assert gradient.count("name=flash_forward") == gradient.count("name=flash_backward") == 1


def device(platform="gpu", capability="9.0"):
    return types.SimpleNamespace(platform=platform, compute_capability=capability)


@pytest.fixture
def tokamax(monkeypatch):
    """The pinned version, whether installed or not: `tokamax(version)` sets another, None for none."""
    use = lambda version: monkeypatch.setattr(mosaic, "_installed", lambda: version)
    use(mosaic.VERSION)
    return use


@pytest.mark.parametrize(("capability", "head_dim"), [("9.0", 128), ("9.0", 256), ("10.0", 192)])
def test_auto_takes_mosaic_where_it_runs(tokamax, capability, head_dim):
    """Hopper and B200 in bfloat16, up to the largest head that compiles for them."""
    chosen = choose_kernel("auto", device=device(capability=capability), dtype=jnp.bfloat16, head_dim=head_dim)
    assert chosen == "mosaic"


@pytest.mark.parametrize(
    ("where", "dtype", "head_dim", "version", "said"),
    [
        (types.SimpleNamespace(platform="cpu"), "bfloat16", 128, mosaic.VERSION, "not the platform cpu"),
        (device(capability="8.0"), "bfloat16", 128, mosaic.VERSION, "not a GPU of 8.0"),
        (device(), "float32", 128, mosaic.VERSION, "compute_dtype bfloat16, not float32"),
        (device(), "bfloat16", 320, mosaic.VERSION, "256 or less on this GPU, not 320"),
        (device(capability="10.0"), "bfloat16", 256, mosaic.VERSION, "192 or less on this GPU, not 256"),
        (device(), "bfloat16", 128, None, "it is not installed"),
        (device(), "bfloat16", 128, "0.1.0", "found 0.1.0"),
    ],
)
def test_where_mosaic_cannot_run(tokamax, where, dtype, head_dim, version, said):
    """`auto` takes the kernel that runs anywhere; a request for mosaic is refused with the reason and the way out."""
    tokamax(version)
    options = {"device": where, "dtype": jnp.dtype(dtype), "head_dim": head_dim}
    assert choose_kernel("auto", **options) == choose_kernel("xla", **options) == "xla"
    with pytest.raises(UserError, match=r"^attention: mosaic needs .*; or set attention: auto or xla$") as error:
        choose_kernel("mosaic", **options)
    assert said in str(error.value)


def test_xla_is_taken_where_it_is_asked_for(tokamax):
    """On a GPU that has the other kernel too."""
    assert choose_kernel("xla", device=device(), dtype=jnp.bfloat16, head_dim=128) == "xla"
