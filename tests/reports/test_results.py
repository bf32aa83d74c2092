"""A `results.json` that somebody edited or cut is one line that says where."""

import copy
import json

import pytest

from osprey_jax.command import UserError
from osprey_jax.reports.results import read_results
from tests.reports.measured_results import asked, failure, measurement

GOOD = measurement(asked("off", [1.0, 2.0]), asked("osprey", [1.0, 2]) | {"failures": [failure("code2", 0.5)]})


@pytest.fixture
def read(tmp_path):
    def call(results):
        (tmp_path / "results.json").write_text(results if isinstance(results, str) else json.dumps(results))
        return read_results(tmp_path / "results.json")

    return call


def changed(path, *value):
    """GOOD with a value at `path`, or without what is there."""
    results = copy.deepcopy(GOOD)
    *parents, last = path
    inner = results
    for key in parents:
        inner = inner[key]
    if value:
        inner[last] = value[0]
    else:
        del inner[last]
    return results


def test_what_evaluate_writes_is_read_as_it_is(read):
    """Times may be whole numbers; keys that no decision needs stay; another engine's results are not looked at."""
    assert read(GOOD) == GOOD
    other = {"engine": "in_process", "results": [{"drafter": "d"}]}
    assert read(other) == other


REQUEST = ("results", 0, "requests", 1)


@pytest.mark.parametrize(
    "results, where",
    [
        (changed(["results"]), "results"),
        (changed(["results"], None), "results"),
        (changed(["results", 1], None), "results.1"),
        (changed(["results", 1, "failures"]), "results.1.failures"),
        (changed(["results", 1, "failures", 0, "reason"], 5), "results.1.failures.0.reason"),
        (changed([*REQUEST, "id"]), "results.0.requests.1.id"),
        (changed([*REQUEST, "seconds"], "1"), "results.0.requests.1.seconds"),
        (changed([*REQUEST, "seconds"], float("nan")), "results.0.requests.1.seconds"),
        (changed([*REQUEST, "lost_seconds"], -1.0), "results.0.requests.1.lost_seconds"),
        (changed([*REQUEST, "matches_off"], "no"), "results.0.requests.1.matches_off"),
        (changed([*REQUEST, "first_difference"], {}), "results.0.requests.1.first_difference.token"),
        (changed(["results", 0, "busy_seconds"], -5.0), "results.0.busy_seconds"),
        (changed(["config", "seed"], "x"), "config.seed"),
        (changed(["hardware"], None), "hardware"),
        (changed(["results"], GOOD["results"] + GOOD["results"][:1]), "results: .* twice"),
    ],
)
def test_what_is_not_as_it_was_written(read, results, where):
    """No traceback, and no figure made of it."""
    with pytest.raises(UserError, match=rf"results\.json: {where}.*; run the same command without --decide") as caught:
        read(results)
    assert "\n" not in str(caught.value)


def test_one_that_was_cut(read):
    with pytest.raises(UserError, match="not valid JSON"):
        read(json.dumps(GOOD)[:500])
