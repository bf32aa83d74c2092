import jax
import jax.numpy as jnp
import numpy as np
import pytest

from osprey_jax.decoding.generate import Sampling, generate, nucleus
from osprey_jax.decoding.requests import PREFILL_CHUNK, Request
from osprey_jax.models.hf import load_causal_lm

NEVER = (10**6,)  # a stop id that no vocabulary has


def slow_greedy(model, causal, prompt, limit, stop_ids, length=64):
    """The whole row read again for each token."""

    @jax.jit
    def logits(tokens_1xS):
        return model.logits(model(tokens_1xS, jnp.arange(length)[None], causal)[0])[0]

    tokens = list(prompt)
    while len(tokens) - len(prompt) < limit and (len(tokens) == len(prompt) or tokens[-1] not in stop_ids):
        padded = np.zeros((1, length), np.int32)
        padded[0, : len(tokens)] = tokens
        tokens.append(int(logits(padded)[len(tokens) - 1].argmax()))
    return tokens[len(prompt) :]


def greedy(model, prompts, limit, stop_ids=NEVER, rows=1):
    return [c.token_ids for c in generate(model, [Request(p, limit) for p in prompts], stop_ids=stop_ids, rows=rows)]


def test_greedy_equals_reading_the_whole_row_again(golden, make):
    """The cache changes the cost, not the text, for rows of different lengths side by side."""
    model = load_causal_lm(golden / "target")
    prompts = make.prompts((1, 2, 9, 31, 33), model.config.vocab_size)
    expected = [slow_greedy(model, make.causal, prompt, 20, NEVER) for prompt in prompts]
    assert greedy(model, prompts, 20) == expected


def test_tied_head_and_one_key_head(make):
    """Heads in groups of four, and the embedding as head."""
    model = make.target(3, tie_word_embeddings=True, num_kv_heads=1, qk_norm=False, num_layers=2)
    prompts = make.prompts((3, 12))
    expected = [slow_greedy(model, make.causal, prompt, 20, NEVER) for prompt in prompts]
    assert greedy(model, prompts, 20) == expected


def test_a_long_prompt_is_read_in_chunks(make):
    """A prompt that ends within any chunk, or at its end, goes on as if read at once."""
    model = make.target(2, num_layers=2)
    prompts = make.prompts((5, PREFILL_CHUNK, PREFILL_CHUNK + 1))
    length = PREFILL_CHUNK + 16
    expected = [slow_greedy(model, make.causal, prompt, 8, NEVER, length) for prompt in prompts]
    assert greedy(model, prompts, 8) == expected


def test_stop_token_ends_a_row_alone(make):
    """The stop token is kept, nothing follows it, and the other rows go on."""
    model = make.target(1)
    prompts = make.prompts((4, 6, 8, 10))
    free = greedy(model, prompts, 32)
    stop = free[0][10]
    ended = generate(model, [Request(p, 32) for p in prompts], stop_ids=(stop, *NEVER))
    for tokens, completion in zip(free, ended, strict=True):
        cut = tokens.index(stop) + 1 if stop in tokens else len(tokens)
        assert completion.token_ids == tokens[:cut]
        assert completion.finish_reason == ("stop" if stop in tokens else "length")
    assert len({len(c.token_ids) for c in ended}) > 1


def test_stop_at_the_limit_is_a_stop(make):
    """As in SGLang: the stop token wins over the limit when both are reached by one token."""
    model, prompt = make.target(1), make.prompts((4,))[0]
    free = greedy(model, [prompt], 8)[0]
    completion = generate(model, [Request(prompt, free.index(free[7]) + 1)], stop_ids=(free[7],))[0]
    assert completion.finish_reason == "stop"
    assert completion.token_ids == free[: free.index(free[7]) + 1]


def test_each_row_has_its_limit(make):
    """Requests near the end of the context get fewer tokens than the rest of their batch."""
    model = make.target(1)
    prompts = make.prompts((4, 6, 8))
    whole = greedy(model, prompts, 20)
    cut = generate(model, [Request(p, n) for p, n in zip(prompts, (1, 20, 7), strict=True)], stop_ids=NEVER)
    assert [c.token_ids for c in cut] == [whole[0][:1], whole[1], whole[2][:7]]
    assert {c.finish_reason for c in cut} == {"length"}


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0.8, top_p=0.9, seed=5)])
def test_a_row_does_not_depend_on_its_batch(make, sampling):
    """Neither order nor neighbours nor empty rows change a request, sampled or greedy."""
    model = make.target(1)
    requests = [Request(p, 24, record=100 + i, turn=i % 2) for i, p in enumerate(make.prompts((3, 5, 30, 40)))]
    alone = [generate(model, [r], stop_ids=NEVER, sampling=sampling)[0] for r in requests]
    together = generate(model, requests[::-1], stop_ids=NEVER, sampling=sampling, rows=6)[::-1]
    assert together == alone


def test_sampling_differs_by_seed_record_and_turn(make):
    """Each of the three makes other random numbers, and the same three make the same."""
    model, prompt = make.target(1), make.prompts((6,))[0]

    def sample(seed=0, record=0, turn=0):
        request = Request(prompt, 32, record, turn)
        return tuple(generate(model, [request], stop_ids=NEVER, sampling=Sampling(2.0, 1.0, seed))[0].token_ids)

    assert sample() == sample()
    assert len({sample(), sample(seed=1), sample(record=1), sample(turn=1)}) == 4


def test_sampling_differs_by_step(make):
    """Each token has random numbers of its own: where all tokens are equally likely, all of them come."""
    model = make.target(1)
    model.lm_head.weight[...] *= 0.0
    [completion] = generate(model, [Request([3], 96)], stop_ids=NEVER, sampling=Sampling(1.0))
    assert len(set(completion.token_ids)) == 11


def test_samples_follow_the_distribution(make):
    """First tokens of many records are distributed as softmax(logits / temperature) restricted to the nucleus."""
    model, prompt = make.target(4), make.prompts((6,))[0]
    model.lm_head.weight[...] *= 0.1
    n, temperature, top_p = 1500, 1.3, 0.8
    requests = [Request(prompt, 1, record=i) for i in range(n)]
    drawn = [c.token_ids[0] for c in generate(model, requests, stop_ids=NEVER, sampling=Sampling(temperature, top_p))]
    hidden, _, _ = model(jnp.asarray([prompt]), jnp.arange(6)[None], make.causal)
    logits = np.asarray(model.logits(hidden)[0, -1], np.float64) / temperature
    probability = np.exp(logits - logits.max())
    probability /= probability.sum()
    order = np.argsort(-probability)
    kept = order[: np.searchsorted(np.cumsum(probability[order]), top_p) + 1]
    expected = np.zeros_like(probability)
    expected[kept] = probability[kept] / probability[kept].sum()
    assert 1 < len(kept) < len(probability)
    np.testing.assert_allclose(np.bincount(drawn, minlength=len(expected)) / n, expected, atol=0.05)


def test_nucleus_is_the_smallest_that_reaches_p():
    """A token is kept while those before it have not yet reached p; the likeliest always is."""
    logits_1xV = jnp.log(jnp.asarray([[0.1, 0.5, 0.25, 0.15]]))
    for p, kept in ((0.4, [1]), (0.55, [1, 2]), (0.8, [1, 2, 3]), (0.95, [0, 1, 2, 3]), (1e-9, [1])):
        assert np.flatnonzero(nucleus(logits_1xV, jnp.float32(p))[0]).tolist() == kept
