"""Counted on the jaxpr and on paper: the two agree on the real step, but for what the step saves or repeats."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import pytest

from osprey_jax.benchmark import shapes
from osprey_jax.planning import flops
from osprey_jax.planning.compiled import step_of
from tests.planning.cases import SMALL, TARGET

S, CHUNK = 32, 8
CPU = jax.devices()[:1]


def ratios(config, *, supervised: float = 1.0, devices=CPU, rows: int = 2):
    """(executed / needed of products, of attention) of a config's step on each of the devices."""
    step = step_of(config, devices)
    jaxpr = step.trace().jaxpr.jaxpr
    trips = math.ceil(supervised * rows * S / config.accumulation / CHUNK)
    executed = flops.executed(jaxpr, trips=trips)
    design, steps = step.design, config.ttt.length if hasattr(config, "ttt") else 1
    needed = flops.needed(design.trained, design.target, rows=rows, length=S, steps=steps)
    return executed.products / needed.products, executed.attention / needed.attention


def distill(directory, *, drafter=None, target=TARGET, rows=2, **others):
    drafter = drafter or shapes.converted(SMALL, TARGET)
    ttt = {"length": 3, "loss_chunk": CHUNK}
    return shapes.distill_config(directory, target, drafter, rows=rows, length=S, ttt=ttt, **others)


def test_products_loops_and_branches():
    """A scan runs its length, a dynamic loop the given rounds, a `cond` its dearer branch."""
    x = jnp.ones((4, 8))
    w = jnp.ones((8, 8))
    once = 2 * 4 * 8 * 8
    count = lambda f, trips=1: flops.executed(jax.make_jaxpr(f)(x, w).jaxpr, trips=trips).products
    assert count(lambda x, w: x @ w) == once
    assert count(lambda x, w: jax.lax.scan(lambda x, _: (x @ w, None), x, length=5)[0]) == 5 * once
    assert count(lambda x, w: jax.lax.fori_loop(0, jnp.int32(x[0, 0]), lambda i, x: x @ w, x), trips=7) == 7 * once
    assert count(lambda x, w: jax.lax.cond(x[0, 0] > 0, lambda: x @ w, lambda: x @ w @ w)) == 2 * once


def test_batched_products():
    """Batch dimensions are part of the result and are not contracted."""
    x = jnp.ones((3, 4, 8))
    jaxpr = jax.make_jaxpr(lambda x: jnp.einsum("bik,bjk->bij", x, x))(x)
    assert flops.executed(jaxpr.jaxpr, trips=1).products == 3 * 2 * 4 * 4 * 8


def test_distillation_runs_what_it_needs(tmp_path):
    """Nothing is computed twice: target and its head once, each drafter weight three times a step of the unroll."""
    products, attention = ratios(distill(tmp_path))
    assert products == pytest.approx(1.0)
    heads, target_heads = 3 * SMALL.num_layers * SMALL.num_heads, TARGET.num_layers * TARGET.num_heads
    assert attention == pytest.approx((7 * heads + 2 * target_heads) / (6 * heads + 2 * target_heads))


def test_unsupervised_positions_cost_no_head(tmp_path):
    """The loss walks only what is supervised."""
    half = distill(tmp_path)
    head = TARGET.vocab_size * (2 * TARGET.hidden_size + 3 * 6 * SMALL.hidden_size)
    step = step_of(half, CPU)
    whole = flops.needed(step.design.trained, step.design.target, rows=2, length=S, steps=3)
    assert ratios(half, supervised=0.5)[0] == pytest.approx(1 - 0.5 * head * 2 * S / whole.products)


def test_accumulation_changes_nothing(tmp_path):
    """Parts of a batch are a scan over the same work."""
    assert ratios(distill(tmp_path, rows=4, accumulation=2), rows=4)[0] == pytest.approx(1.0)


@pytest.mark.parametrize("remat", ["mlp", "layer", "step"])
def test_remat_shows(tmp_path, remat):
    """What the backward pass computes again is executed and not needed."""
    assert ratios(distill(tmp_path, remat=remat))[0] > 1.02


def test_pretraining_runs_what_it_needs(tmp_path):
    """Each weight once forward and twice backward, the tied head's too."""
    for tied in (False, True):
        model = dataclasses.replace(SMALL, tie_word_embeddings=tied)
        config = shapes.pretrain_config(tmp_path / str(tied), model, rows=2, length=S, loss_chunk=CHUNK)
        products, attention = ratios(config)
        assert products == pytest.approx(1.0)
        assert attention == pytest.approx(7 / 6)


@pytest.mark.multidevice
def test_each_device_does_its_share(tmp_path):
    """On a mesh the count is one device's, and with a tensor-parallel target no product is done twice."""
    target = dataclasses.replace(TARGET, num_heads=8, num_kv_heads=4)
    config = distill(tmp_path, target=target, rows=8, mesh={"tensor": 4})
    assert ratios(config, devices=jax.devices()[:8], rows=1)[0] == pytest.approx(1.0)


def test_the_baseline_runs_what_it_needs(tmp_path):
    """EAGLE-3 from scratch has the target's widths, and an embedding without gradient."""
    config = distill(tmp_path)
    scratch = type(config.drafter)(scratch={"num_layers": 1})
    assert ratios(config.model_copy(update={"drafter": scratch}))[0] == pytest.approx(1.0)


def test_a_trimmed_vocabulary_shows(tmp_path):
    """The teacher's best token is looked for in its whole vocabulary, then its softmax taken over the kept part."""
    config = distill(tmp_path)
    trimmed = config.drafter.model_copy(update={"draft_vocab_size": 32})
    step = step_of(config.model_copy(update={"drafter": trimmed}), CPU)
    needed = flops.needed(step.design.trained, step.design.target, rows=2, length=S, steps=3)
    again = 2 * 2 * S * 32 * TARGET.hidden_size
    expected = 1 + again / needed.products
    assert ratios(config.model_copy(update={"drafter": trimmed}))[0] == pytest.approx(expected)
