import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file

from osprey_jax.decoding.generate import generate
from osprey_jax.decoding.requests import Request
from osprey_jax.decoding.speculate import Speculation, speculate
from osprey_jax.models.hf import hf_names, load_causal_lm, load_drafter

NEVER = (10**6, 10**6)  # stop ids that no vocabulary has
TAPS = (1, 2, 3)


# ---- an independent simulation: no cache, every pass over the whole row, the drafter's keys explicit


LENGTH = 96  # of the rows it reads


@functools.partial(jax.jit, static_argnames=("graph", "causal", "taps"))
def read_row(graph, weights, tokens_1xS, *, causal, taps):
    """The target's choice after each token, and its features."""
    target = nnx.merge(graph, weights)
    hidden, features, _ = target(tokens_1xS, jnp.arange(LENGTH)[None], causal, tap_layers=taps)
    return target.logits(hidden)[0].argmax(-1), features


@functools.partial(jax.jit, static_argnames="graph")
def draft_step(graph, weights, token, feature, position, memory, k, p):
    """Step k of TTT: its keys are those of step 0 up to p, and one of each later step, in places of their own."""
    drafter = nnx.merge(graph, weights)

    def attend(q, k_, v, memory):
        at = (0, jnp.where(k == 0, 0, LENGTH + k - 1), 0, 0)
        keys, values = (jax.lax.dynamic_update_slice(x, y, at) for x, y in zip(memory, (k_, v), strict=True))
        place, query = jnp.arange(keys.shape[1]), jnp.arange(q.shape[1])[:, None]
        seen = jnp.where(k == 0, place <= query, (place <= p) | ((place >= LENGTH) & (place < LENGTH + k)))
        share = q.shape[2] // k_.shape[2]
        scores = jnp.einsum("bsnh,btnh->bnst", q, jnp.repeat(keys, share, axis=2)) / q.shape[-1] ** 0.5
        weights = jax.nn.softmax(jnp.where(seen, scores, -1e30), axis=-1)
        return jnp.einsum("bnst,btnh->bsnh", weights, jnp.repeat(values, share, axis=2)), (keys, values)

    feature = drafter.project(feature) if len(token[0]) == LENGTH else feature  # step 0 reads the target's
    stream, memory = drafter(drafter.embed_tokens(token, jnp.float32), feature, position, attend, memory)
    last = jax.lax.dynamic_slice_in_dim(stream, jnp.where(k == 0, p, 0), 1, axis=1)
    return last, drafter.to_target_ids(drafter.logits(last).argmax(-1)), memory


class Slow:
    """Draft-and-verify for one request at a time."""

    def __init__(self, target, drafter, causal, taps=TAPS, draft_steps=5):
        self.target, self.drafter, self.draft_steps = nnx.split(target), nnx.split(drafter), draft_steps
        self.options, self.config = {"causal": causal, "taps": taps}, drafter.config.transformer

    def read(self, tokens_1xS):
        return read_row(*self.target, tokens_1xS, **self.options)

    def draft(self, tokens_1xS, features, p):
        """Tokens for positions p + 2 .. from what is true up to position p."""
        c = self.config
        memory = [(jnp.zeros((1, LENGTH + self.draft_steps, c.num_kv_heads, c.head_dim)),) * 2] * c.num_layers
        token, feature, position = np.roll(tokens_1xS, -1, axis=1), features, np.arange(LENGTH)[None]
        out = []
        for k in range(self.draft_steps):
            feature, token, memory = draft_step(*self.drafter, token, feature, position, memory, k, p)
            position = np.full((1, 1), p + k + 1)
            out.append(int(token[0, 0]))
        return out

    def pad(self, tokens):
        return np.asarray([tokens + [0] * (LENGTH - len(tokens))], np.int32)

    def __call__(self, prompt, limit, stop_ids=NEVER):
        """(completion tokens, verifications, histogram) by SGLang's rules."""
        best, _ = self.read(self.pad(prompt))
        tokens = [*prompt, int(best[len(prompt) - 1])]
        verifications, histogram = 0, [0] * (self.draft_steps + 1)
        while len(tokens) - len(prompt) < limit and not set(tokens[len(prompt) :]) & set(stop_ids):
            _, features = self.read(self.pad(tokens))
            drafted = self.draft(self.pad(tokens), features, len(tokens) - 2)
            best = self.read(self.pad(tokens + drafted))[0].tolist()
            accepted = 0
            while accepted < self.draft_steps and drafted[accepted] == best[len(tokens) - 1 + accepted]:
                accepted += 1
            tokens = tokens + drafted[:accepted] + [best[len(tokens) - 1 + accepted]]
            verifications += 1
            histogram[accepted] += 1
        new = tokens[len(prompt) :]
        ends = [i + 1 for i, token in enumerate(new) if token in stop_ids]
        return new[: min([limit, *ends])], verifications, tuple(histogram)


def run(target, drafter, prompts, limit=32, stop_ids=NEVER, taps=TAPS, draft_steps=5, rows=1):
    requests = [Request(p, limit) for p in prompts]
    return speculate(target, drafter, requests, tap_layers=taps, draft_steps=draft_steps, stop_ids=stop_ids, rows=rows)


def facts(result: Speculation):
    return result.completion.token_ids, result.verifications, result.histogram


def without(target, prompts, limit=32, stop_ids=NEVER):
    return generate(target, [Request(p, limit) for p in prompts], stop_ids=stop_ids)


LENGTHS = (1, 2, 14, 33)  # the shortest prompts, and two prefill buckets


# ---- tests


def test_golden_models_follow_the_simulation(golden, make):
    """Hidden sizes differ, RoPE is scaled in one case, the norms are far from uniform."""
    target = load_causal_lm(golden / "target")
    drafter = load_drafter(golden / "expected/converted")
    perturbed = load_file(golden / "expected/ttt/perturbed.safetensors")
    for path, parameter in nnx.to_flat_state(nnx.state(drafter, nnx.Param)):
        parameter[...] = jnp.asarray(perturbed[hf_names(path, num_layers=2, drafter=True)[0]])
    taps = tuple(np.load(golden / "expected/target.npz")["tap_layers"].tolist())
    prompts = make.prompts(LENGTHS, target.config.vocab_size)
    slow = Slow(target, drafter, make.causal, taps)
    assert [facts(r) for r in run(target, drafter, prompts, 24, taps=taps)] == [slow(p, 24) for p in prompts]


@pytest.mark.parametrize(
    "shape",
    [
        {"swap": True, "num_layers": 1},
        {"swap": False, "num_layers": 2, "qk_norm": False},
        {"swap": True, "num_layers": 2, "hidden_size": 24, "draft_ids": [0, 1, 3, 4]},
        {"swap": False, "num_layers": 1, "draft_ids": [1, 2, 4], "num_heads": 2, "num_kv_heads": 1},
    ],
    ids=str,
)
def test_every_form_of_drafter_follows_the_simulation(make, shape):
    """Streams either way round, one or two layers, another width, a trimmed vocabulary: in so small a vocabulary
    random guesses hit now and then."""
    target, drafter = make.target(5, num_layers=4, vocab_size=5), make.drafter(7, vocab_size=5, **shape)
    prompts = make.prompts(LENGTHS, 5)
    slow = Slow(target, drafter, make.causal)
    results = [facts(r) for r in run(target, drafter, prompts)]
    assert results == [slow(p, 32) for p in prompts]
    assert sum(sum(r[2][1:]) for r in results) > 10, "hardly anything was accepted: the case shows nothing"


def test_good_drafters_follow_the_simulation(make):
    """Chains accepted in full and in part: what the drafter re-reads after each verification decides the next."""
    prompts = make.prompts(LENGTHS, 64)
    for noise in (0.0, 0.05):
        target, drafter = make.alike(3, noise=noise, vocab_size=64)
        slow = Slow(target, drafter, make.causal)
        results = [facts(r) for r in run(target, drafter, prompts)]
        assert results == [slow(p, 32) for p in prompts]
        assert np.count_nonzero(np.sum([r[2] for r in results], axis=0)) >= 4, "the histogram is not varied"


def test_text_is_the_targets_own(make):
    """Greedy with a drafter equals greedy without, whether its guesses are good or bad."""
    prompts = make.prompts(LENGTHS, 64)
    for noise in (0.0, 0.3):
        target, drafter = make.alike(3, noise=noise, vocab_size=64)
        assert [r.completion for r in run(target, drafter, prompts)] == without(target, prompts)


def test_a_batch_equals_one_at_a_time(make):
    """Rows finish apart, at other lengths and other speeds, and empty rows fill the batch."""
    target, drafter = make.alike(3, noise=0.05, vocab_size=64)
    prompts = make.prompts((1, 40, 7, 3), 64)
    limits = (32, 5, 17, 1)
    requests = [Request(p, n) for p, n in zip(prompts, limits, strict=True)]
    options = {"tap_layers": TAPS, "draft_steps": 5, "stop_ids": NEVER}
    alone = [speculate(target, drafter, [r], **options)[0] for r in requests]
    assert speculate(target, drafter, requests, rows=7, **options) == alone
    assert [len(r.completion.token_ids) for r in alone] == list(limits)


def test_the_last_verification_counts_in_full(make):
    """As in SGLang: the completion is cut at the limit or the stop token, the histogram is not."""
    target, drafter = make.alike(3, vocab_size=64)
    prompts = make.prompts(LENGTHS, 64)
    slow = Slow(target, drafter, make.causal)
    stop = [without(target, [p], 32)[0].token_ids[9] for p in prompts[:2]]
    cut = 0
    for limit in range(2, 32, 5):
        results = run(target, drafter, prompts, limit, stop_ids=stop)
        assert [facts(r) for r in results] == [slow(p, limit, stop) for p in prompts]
        assert [r.completion for r in results] == without(target, prompts, limit, stop_ids=stop)
        for r in results:
            assert sum(r.histogram) == r.verifications
            cut += 1 + sum(n * (i + 1) for i, n in enumerate(r.histogram)) - len(r.completion.token_ids)
    assert cut > 0, "no verification was cut: the case shows nothing"


def test_ended_by_the_first_token(make):
    """One token, from the prefill: no verification, and no accepted length, as in SGLang."""
    target, drafter = make.alike(3, vocab_size=64)
    prompt = make.prompts((6,), 64)
    first = without(target, prompt, 1)[0].token_ids
    by_limit, by_stop = run(target, drafter, prompt, 1)[0], run(target, drafter, prompt, 9, stop_ids=first * 2)[0]
    for result, reason in ((by_limit, "length"), (by_stop, "stop")):
        assert (result.completion.token_ids, result.completion.finish_reason) == (first, reason)
        assert (result.verifications, result.accepted_length, set(result.histogram)) == (0, None, {0})


def test_accepted_length_is_tokens_per_verification(make):
    """The first token counts, so a useless drafter reads a little above 1."""
    target, drafter = make.target(5, num_layers=4, vocab_size=64), make.drafter(7, vocab_size=64, num_layers=1)
    drafter.lm_head.weight[...] *= 0.0  # always drafts token 0
    result = run(target, drafter, make.prompts((6,), 64))[0]
    assert result.histogram[0] == result.verifications == 31
    assert result.accepted_length == 32 / 31


@pytest.mark.parametrize("draft_steps", [1, 3])
def test_any_number_of_draft_steps(make, draft_steps):
    """One step is the re-read alone. A prompt and a limit that fill their buckets leave the cache no slack."""
    target, drafter = make.alike(3, vocab_size=64)
    prompts = make.prompts((1, 32, 32), 64)
    slow = Slow(target, drafter, make.causal, draft_steps=draft_steps)
    results = run(target, drafter, prompts, draft_steps=draft_steps)
    assert [facts(r) for r in results] == [slow(p, 32) for p in prompts]
