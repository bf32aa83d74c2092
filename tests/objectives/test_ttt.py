"""Properties of the distillation objective that the golden values do not show."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from osprey_jax.config import TTT
from osprey_jax.kernels.attention import attend_rows
from osprey_jax.models import hf
from osprey_jax.models.drafter import VocabularyMap
from tests.conftest import GOLDEN
from tests.objectives.cases import (
    EXACT,
    RELEASED,
    golden_objective,
    loss_and_grads,
    relative,
    streams,
    worst_gradient_error,
)

# Three steps show what five do, and compile in half the time.
RELEASED, EXACT = (ttt.model_copy(update={"length": 3}) for ttt in (RELEASED, EXACT))


@pytest.fixture
def golden():
    """One case is enough: the two differ in the model, which the golden values cover."""
    return GOLDEN / "qwen3"


BOTH = pytest.mark.parametrize("ttt", [RELEASED, EXACT], ids=["released", "exact"])


@pytest.mark.parametrize("taps", [(1, 3, 5), (0, 7, 8)])
def test_converted_drafter_equals_the_backbone(golden, golden_batch, taps):
    """Right after conversion step k at p gives the backbone's logits at p+k on x[1:], for every k and any taps."""
    objective, *state = golden_objective(golden, "converted", RELEASED)
    objective = dataclasses.replace(objective, tap_layers=taps)
    drafter = nnx.merge(objective.drafter_def, *state[:2])
    expected = backbone_logits(backbone_of(golden, drafter), golden_batch)
    for k, stream in enumerate(streams(objective, *state, golden_batch)):
        logits = drafter.logits(stream)
        for row, length in enumerate(golden_batch["segment_ids"].sum(axis=1)):
            last = length - 1 - k  # positions p with a real token x[p+1+k]
            assert relative(logits[row, :last], expected[row, k : k + last]) < 1e-5, (k, row)


@nnx.jit
def backbone_logits(backbone, batch):
    """Logits at each token of x[1:]."""
    token_ids, segment_ids = batch["token_ids"][:, 1:], batch["segment_ids"][:, 1:]
    hidden, _, _ = backbone(token_ids, batch["positions"][:, 1:] - segment_ids, attend_rows(segment_ids))
    return backbone.logits(hidden)


def backbone_of(golden, drafter):
    """The pruned source read in the target's vocabulary: its blocks with the aligned embedding and head."""
    pruned = hf.load_causal_lm(golden / "expected" / "pruned")
    vocab_size = drafter.config.transformer.vocab_size
    config = dataclasses.replace(pruned.config, vocab_size=vocab_size, tie_word_embeddings=False)
    model = hf.abstract_causal_lm(config)
    values = dict(nnx.to_flat_state(nnx.state(pruned)))
    shape_of = nnx.to_flat_state(nnx.state(model))
    values[("embed_tokens", "weight")] = values[("norm", "weight")].replace(drafter.embed_tokens.weight[...])
    values[("lm_head", "weight")] = values[("norm", "weight")].replace(drafter.lm_head.weight[...])
    nnx.update(model, nnx.from_flat_state([(path, values[path]) for path, _ in shape_of]))
    return model


@BOTH
def test_padding_changes_nothing(golden, golden_batch, ttt):
    """Rows made longer by padding, and a whole row of padding, give the same loss and gradients."""
    case = golden_objective(golden, "perturbed", ttt)
    (loss, _), grads = loss_and_grads(*case, golden_batch)
    padded = {name: np.pad(value, ((0, 1), (0, 9))) for name, value in golden_batch.items()}
    padded["token_ids"][:, 40:] = 77  # whatever stands in padding
    (padded_loss, _), padded_grads = loss_and_grads(*case, padded)
    assert relative(padded_loss, loss) < 1e-6
    assert worst_gradient_error(padded_grads, grads) < 1e-5


@BOTH
def test_chunks_of_the_loss_change_nothing(golden, golden_batch, ttt):
    """Any number of positions whose logits exist together gives the same loss and gradients."""
    (loss, _), grads = loss_and_grads(*golden_objective(golden, "perturbed", ttt), golden_batch)
    for chunk in (11, 512):
        other = ttt.model_copy(update={"loss_chunk": chunk})
        (other_loss, _), other_grads = loss_and_grads(*golden_objective(golden, "perturbed", other), golden_batch)
        assert relative(other_loss, loss) < 1e-6
        assert worst_gradient_error(other_grads, grads) < 1e-5


@pytest.mark.parametrize("normalization", ["sequence", "token"])
@pytest.mark.parametrize("supervision", ["released", "exact"])
def test_nothing_supervised(golden, golden_batch, supervision, normalization):
    """Without a supervised position the loss is 0 and every gradient finite (and 0)."""
    ttt = TTT(length=2, supervision=supervision, normalization=normalization)
    batch = golden_batch | {"loss_mask": np.zeros_like(golden_batch["loss_mask"])}
    (loss, _), grads = loss_and_grads(*golden_objective(golden, "perturbed", ttt), batch)
    assert loss == 0
    assert all(not np.any(np.asarray(grad)) for grad in jax.tree.leaves(grads))


def test_trimmed_vocabulary_that_keeps_everything(golden, golden_batch):
    """A map of all target ids in order is the full vocabulary."""
    full = golden_objective(golden, "perturbed", EXACT)
    (loss, _), grads = loss_and_grads(*full, golden_batch)
    # The objective takes the map's path as soon as there is one: give it one of full size.
    objective, params, constants, frozen = full
    drafter = nnx.merge(objective.drafter_def, params, constants)
    drafter.target_ids = nnx.data(VocabularyMap(jnp.arange(drafter.config.draft_vocab_size, dtype=jnp.int32)))
    drafter_def, params, constants = nnx.split(drafter, nnx.Param, ...)
    objective = dataclasses.replace(objective, drafter_def=drafter_def)
    (mapped_loss, _), mapped_grads = loss_and_grads(objective, params, constants, frozen, golden_batch)
    assert relative(mapped_loss, loss) < 1e-6
    assert worst_gradient_error(mapped_grads, grads) < 1e-5


def test_trimmed_vocabulary_against_the_definition(golden, golden_batch):
    """Teacher restricted and renormalised; positions whose best token is outside are not supervised."""
    target_ids = np.sort(np.random.default_rng(0).permutation(456)[:300])
    objective, params, constants, frozen = golden_objective(golden, "perturbed", EXACT, target_ids)
    (loss, metrics), _ = loss_and_grads(objective, params, constants, frozen, golden_batch)

    target_logits = np.load(golden / "expected" / "target.npz")["logits"].astype(np.float64)
    drafter = nnx.merge(objective.drafter_def, params, constants)
    expected, counts = 0.0, []
    for k, stream in enumerate(streams(objective, params, constants, frozen, golden_batch)):
        logits = np.asarray(drafter.logits(stream), np.float64)
        losses = []
        for row, p in np.argwhere(golden_batch["segment_ids"] > 0):
            span = golden_batch["loss_mask"][row, p + 1 : p + 3 + k]
            if len(span) < k + 2 or not span.all():
                continue
            teacher = target_logits[row, p + 1 + k]
            if teacher.argmax() in target_ids:
                soft = np.exp(teacher[target_ids] - np.logaddexp.reduce(teacher[target_ids]))
                losses.append(np.logaddexp.reduce(logits[row, p]) - soft @ logits[row, p])
        counts.append(len(losses))
        expected += 0.8**k * np.mean(losses)
    np.testing.assert_array_equal(metrics["supervised"], counts)
    assert relative(loss, expected) < 1e-5
