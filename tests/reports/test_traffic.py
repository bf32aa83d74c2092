"""Decisions by hand are in test_decision.py; here is what holds for any measurement."""

import numpy as np
import pytest

from osprey_jax.reports import statistics, traffic
from osprey_jax.reports.traffic import figures, slices
from tests.reports.measured_results import asked, busy, failure, request

MIX = {"code": 0.3, "prose": 0.7}


def random_results(generator, repeats=None):
    """Two arms on two sets, with turns, retries and failures; conversation i is there repeats[set][i] times."""
    results = []
    for arm in ("off", "osprey"):
        for name in ("code", "prose"):
            requests, failures = [], []
            for i in range(5):
                numbers = generator.uniform(0.5, 1.5, (2, 4)).round(3)
                for copy in range(1 if repeats is None else repeats[name][i]):
                    who = f"{i}.{copy}"
                    for turn, (seconds, first, lost, share) in enumerate(numbers[: 1 if i == 0 else 4].tolist()):
                        if i == 2 and turn == 1 and arm == "osprey":
                            failures.append(failure(who, lost, turn=turn))
                            continue
                        verified = {} if arm == "off" else {"verifications": 10, "accepted_length": 3 * share}
                        same = None if i == 3 else bool(share > 1)
                        fields = {"time_to_first_token": first / 9, "lost_seconds": lost * (turn == 0)}
                        requests.append(request(who, seconds, turn=turn, matches_off=same, **fields, **verified))
            names = {"arm": arm, "prompts": name, "concurrency": 1}
            results.append(busy(names | {"failures": failures, "requests": requests}))
    return results


def test_a_resample_is_a_measurement_with_conversations_repeated(monkeypatch):
    """Every figure under draws of conversations is that of results in which they are written out so often."""
    repeats = {"code": [2, 0, 1, 1, 1], "prose": [0, 1, 3, 0, 1]}
    draws_1xC = np.array([[*repeats["code"], *repeats["prose"]]], np.float64)
    parts = slices(random_results(np.random.default_rng(0)), MIX, success_within=2.0)
    drawn = traffic._weighted(parts, draws_1xC)
    written = slices(random_results(np.random.default_rng(0), repeats), MIX, success_within=2.0)
    monkeypatch.setattr(statistics, "RESAMPLES", 10)
    found = figures(written, seed=0)
    assert drawn.keys() == found.keys() and len(found) > 40
    for key, figure in found.items():
        expected = np.nan if figure.value is None else figure.value
        np.testing.assert_allclose(drawn[key], [expected], err_msg=str(key))


def test_figures_are_those_of_everything_counted_once():
    """A figure and its interval come from one function, so that the interval is about that figure."""
    parts = slices(random_results(np.random.default_rng(1)), None, None)
    for key, figure in figures(parts, seed=0).items():
        if figure.interval is not None:
            low, high = figure.interval
            assert low <= figure.value <= high, key


def test_interval_of_the_cost_covers(monkeypatch):
    """In about 95 of 100 measurements the interval holds the cost of the traffic that the prompts were drawn from."""
    monkeypatch.setattr(statistics, "RESAMPLES", 500)
    generator = np.random.default_rng(2)
    covered = 0
    for _ in range(200):
        seconds = generator.gamma(2, 2, 40)
        results = [
            asked("off", seconds.tolist()),
            asked("osprey", (seconds * generator.uniform(0.4, 0.8, 40)).tolist()),
        ]
        low, high = figures(slices(results, None, None), seed=0)["osprey", None, "cost_ratio"].interval
        covered += low <= 0.6 <= high
    assert 0.88 <= covered / 200 <= 0.985


def test_arms_that_are_alike_give_no_difference():
    """Whatever is drawn, it is drawn for both: ratios are 1 in every resample."""
    results = [asked("off", [1.0, 5.0, 9.0]), asked("osprey", [1.0, 5.0, 9.0])]
    found = figures(slices(results, None, None), seed=0)
    for what in ("cost", "seconds", "time_to_first_token", "throughput"):
        assert found["osprey", None, f"{what}_ratio"].interval == pytest.approx([1, 1])
    assert ("off", None, "cost_ratio") not in found
