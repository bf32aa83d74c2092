"""The letters are those of the module: N resamples, C conversations, R requests."""

import numpy as np
import pytest

from osprey_jax.command import UserError
from osprey_jax.reports import statistics
from osprey_jax.reports.statistics import (
    conversation_sums,
    interval,
    mean_interval,
    paired,
    percentile,
    percentiles,
    resample,
    summarize,
)


def request(name, length=None, *, turn=0, tokens=12, **fields):
    """A request whose accepted length is tokens / verifications where `length` is given."""
    verifications = None if length is None else round(tokens / length)
    return {
        "id": name,
        "turn": turn,
        "prompt_tokens": 5,
        "completion_tokens": tokens,
        "verifications": verifications,
        "accepted_length": None if length is None else tokens / verifications,
        "finish_reason": "stop",
        "seconds": None,
        "time_to_first_token": None,
        "milliseconds_per_token": None,
    } | fields


def sample(values, ids=None):
    return [request(f"r{i}" if ids is None else ids[i], seconds=float(value)) for i, value in enumerate(values)]


def test_two_accepted_lengths():
    """A long answer counts once in the mean over requests and by its tokens in the ratio of the sums."""
    summary = summarize([request("a", 2.0, tokens=100), request("b", 4.0, tokens=4)], seed=0)
    assert summary["accepted_length"] == 3.0
    assert summary["tokens_per_verification"] == 104 / 51
    assert (summary["completion_tokens"], summary["verifications"], summary["requests"]) == (104, 51, 2)


def test_a_request_without_verification_is_in_neither_and_counted():
    """An answer of one token says nothing about the drafter, in neither of the two numbers."""
    ended = request("b", tokens=1) | {"verifications": 0}
    summary = summarize([request("a", 2.0), ended], seed=0)
    assert (summary["accepted_length"], summary["tokens_per_verification"]) == (2.0, 2.0)
    assert summary["without_verification"] == 1


def test_speculation_off_has_no_accepted_length():
    """Nothing is verified there, which is not the same as requests that ended too early."""
    summary = summarize([request("a", seconds=2.0), request("b", seconds=4.0)], seed=0, busy_seconds=6.0)
    unknown = ("without_verification", "accepted_length", "tokens_per_verification", "verifications")
    assert all(summary[key] is None for key in unknown)
    assert (summary["seconds_mean"], summary["seconds_p50"], summary["seconds_p95"]) == (3.0, 2.0, 4.0)
    assert summary["throughput"] == 4.0, "24 tokens in 6 busy seconds"
    assert summary["time_to_first_token_mean"] is None


def test_nothing_asked():
    """An arm all of whose requests failed has a summary too."""
    summary = summarize([], seed=0)
    assert (summary["requests"], summary["completion_tokens"], summary["seconds_p95"]) == (0, 0, None)


def test_interval_is_the_normal_one_for_many_requests():
    """The bootstrap of a mean of 400 draws agrees with its textbook standard error."""
    values = np.random.default_rng(1).normal(10, 2, 400)
    low, high = mean_interval(sample(values), "seconds", seed=0)
    error = values.std() / np.sqrt(400)
    np.testing.assert_allclose([low, high], values.mean() + 1.96 * error * np.array([-1, 1]), atol=0.06 * error)


def test_interval_covers(monkeypatch):
    """In about 95 of 100 samples the interval holds the true mean (a little less for a small sample)."""
    monkeypatch.setattr(statistics, "RESAMPLES", 1000)
    generator = np.random.default_rng(2)
    covered = 0
    for _ in range(400):
        low, high = mean_interval(sample(generator.exponential(3, 40)), "seconds", seed=0)
        covered += low <= 3 <= high
    assert 0.88 <= covered / 400 <= 0.975


def test_turns_of_a_conversation_are_drawn_together():
    """Ten turns of one conversation that are alike are worth one request, not ten."""
    values = np.random.default_rng(3).normal(0, 1, 30)
    alone = mean_interval(sample(values), "seconds", seed=0)
    turns = [request(f"c{i}", turn=turn, seconds=float(v)) for i, v in enumerate(values) for turn in range(10)]
    np.testing.assert_allclose(mean_interval(turns, "seconds", seed=0), alone)


def test_one_conversation_has_no_interval():
    """Nothing can be said of how conversations differ from one of them, however many turns it has."""
    assert mean_interval(sample([1, 2, 3], ["a", "a", "a"]), "seconds", seed=0) is None
    assert mean_interval(sample([1, 2, 3], ["a", "a", "b"]), "seconds", seed=0) is not None


def test_seed_reproduces():
    """The same seed gives the same digits, another gives others."""
    requests = sample(np.random.default_rng(4).normal(0, 1, 20))
    first, again, other = (mean_interval(requests, "seconds", seed) for seed in (7, 7, 8))
    assert first == again != other


def test_every_resample_draws_as_many_conversations_as_there_are(monkeypatch):
    """Also when the memory allows but a few resamples at a time."""
    monkeypatch.setattr(statistics, "_DRAWN_AT_ONCE", 100)
    draws_NxC = resample([7], 0, lambda draws_NxC: draws_NxC)
    assert draws_NxC.shape == (statistics.RESAMPLES, 7)
    assert (draws_NxC.sum(1) == 7).all()
    np.testing.assert_allclose(draws_NxC.mean(0), 1, atol=0.05)


def test_samples_are_drawn_from_by_themselves():
    """Each prompt set keeps its size in every resample, and sets of one size are drawn from independently."""
    draws_NxC = resample([3, 5, 5], 0, lambda draws_NxC: draws_NxC)
    assert (draws_NxC[:, :3].sum(1) == 3).all() and (draws_NxC[:, 3:8].sum(1) == 5).all()
    assert abs(np.corrcoef(draws_NxC[:, 3], draws_NxC[:, 8])[0, 1]) < 0.05


def test_undefined_in_a_resample():
    """A ratio that divides by nothing in some resamples has no interval, instead of one that leaves those out."""
    assert interval(np.array([1.0, np.nan, 2.0])) is None
    assert interval(np.array([1.0, np.inf, 2.0])) is None
    assert interval(np.array([0.0, 100.0])) == [2.5, 97.5]


def test_sums_of_conversations():
    """Requests are added up by conversation wherever they stand."""
    sums_CxK = conversation_sums(["a", "b", "a"], np.array([[1.0, 10], [2, 20], [4, 40]]), ["b", "silent", "a"])
    assert sums_CxK.tolist() == [[2, 20], [0, 0], [5, 50]]


# ---- paired


def test_pairs_are_found_by_id_and_turn():
    """Order does not matter, a turn is a request of its own, and what one arm lacks is counted."""
    arm = [request("a", seconds=1.0), request("a", turn=1, seconds=5.0), request("only", seconds=9.0)]
    against = [request("a", turn=1, seconds=7.0), request("a", seconds=4.0), request("x", seconds=0.0)]
    found = paired(arm, against, "seconds", seed=0)
    assert (found["requests"], found["only_arm"], found["only_against"]) == (2, 1, 1)
    assert (found["arm_mean"], found["against_mean"], found["difference"]) == (3.0, 5.5, -2.5)
    assert found["low"] is None, "one conversation"


def test_a_request_without_the_measure_is_left_out_and_counted():
    """A mean difference is of requests of which both arms have the number."""
    arm = [request("a", 2.0), request("b", tokens=1), request("c", 4.0)]
    against = [request("a", 3.0), request("b", 2.0), request("c", tokens=1)]
    found = paired(arm, against, "accepted_length", seed=0)
    assert (found["requests"], found["without_value"], found["difference"]) == (1, 2, -1.0)


def test_pairing_narrows_the_interval():
    """Prompts differ far more than drafters do, and a paired interval does not see the prompts."""
    generator = np.random.default_rng(5)
    hard = generator.normal(10, 5, 60)
    arm, against = sample(hard + generator.normal(1, 0.5, 60)), sample(hard)
    found = paired(arm, against, "seconds", seed=0)
    low, high = mean_interval(arm, "seconds", seed=0)
    assert found["low"] < 1 < found["high"]
    assert found["high"] - found["low"] < (high - low) / 5


def test_same_drafter_differs_by_nothing():
    """An arm against itself: difference 0, and an interval of no width."""
    requests = sample([3, 1, 4, 1, 5])
    found = paired(requests, requests, "seconds", seed=0)
    assert (found["difference"], found["low"], found["high"]) == (0.0, 0.0, 0.0)


def test_two_requests_with_one_id_are_refused():
    """Which of them is the other arm's prompt, nobody could say."""
    with pytest.raises(UserError, match=r"request 'a', turn 0, is there 2 times"):
        paired(sample([1, 2], ["a", "a"]), sample([1]), "seconds", seed=0)


# ---- percentiles


def test_percentile_is_a_value_that_was_measured():
    """19 of 20 values do not exceed the 19th: no number between two requests is made up."""
    values = list(range(20, 0, -1))
    assert percentile(values, 0.95) == 19
    assert percentile(values, 0.5) == 10
    assert percentile([7.0], 0.95) == 7.0
    assert percentile([], 0.95) is None


def test_percentile_by_weight():
    """A slow slice that is rare in the traffic counts for little."""
    assert percentile([1.0, 100.0], 0.95, [97, 3]) == 1.0
    assert percentile([1.0, 100.0], 0.95, [90, 10]) == 100.0


def test_percentiles_of_resamples():
    """Each weighting has its own, as if its values were written out that often."""
    values_R = np.array([5.0, 1.0, 3.0])
    found = percentiles(values_R, np.array([[1.0, 1, 1], [0, 2, 1], [0, 0, 0]]), 0.5)
    np.testing.assert_array_equal(found, [3, 1, np.nan])
