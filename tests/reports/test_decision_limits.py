"""What a drafter must keep to, and when the sample leaves doubt."""

import json

import pytest

from osprey_jax.reports.costs import Limits
from osprey_jax.reports.decision import decide
from tests.reports.measured_results import (
    HALF,
    OFF,
    asked,
    busy,
    check,
    costs,
    failure,
    measurement,
    only,
    request,
    with_requests,
)

NONE = dict.fromkeys(Limits.model_fields)


@pytest.mark.parametrize(
    ("key", "kept", "broken", "measured"),
    [
        ("p95_seconds", 6.0, 5.9, 6.0),
        ("p95_time_to_first_token", 1.1, 1.0, 1.1),
        ("min_share_equal_to_off", 0.75, 0.76, 0.75),
        ("max_failure_share", 0.2, 0.19, 0.2),
        ("max_slice_regression", 0.5, 0.49, 0.5),
    ],
)
def test_limits(key, kept, broken, measured):
    """Each is a number that may be reached and not passed; only the one that is set can discard."""
    arm = with_requests(
        HALF,
        matches_off=[True, True, False, True],
        time_to_first_token=[0.1, 0.1, 0.1, 0.1],
        lost_seconds=[0.0, 0.0, 1.0, 0.0],
    )
    # Five are asked, of which the last fails at once: 21 s for four successes are 5.25; off's prose is 3.5 a success.
    prose = asked("osprey", [5.25, 5.25], "prose")
    off = busy(OFF | {"requests": [*OFF["requests"], request("code4", 10.0)]})
    arm = arm | {"failures": [failure("code4", 0.0)]}
    results = [off, arm]
    if key == "max_slice_regression":
        results += [asked("off", [3.5, 3.5], "prose"), prose]
    free = {"preparation_gpu_hours": 0, "adaptation_gpu_hours": 0}
    for limit, passed in ((kept, True), (broken, False)):
        drafter = only(decide(measurement(*results), costs(limits=NONE | {key: limit}, **free)))
        found = check(drafter, key)
        assert found["measured"] == pytest.approx(measured)
        assert (found["passed"], drafter["keep"]) == (passed, passed)
        others = [row for row in drafter["checks"] if row["limit_key"] not in (key, "months")]
        assert all(row["limit"] is None and row["passed"] is None for row in others)


def test_the_dearest_set_is_named():
    """A saving in the mean may hide a set that got dearer."""
    results = [OFF, HALF, asked("off", [5.0, 5.0], "prose"), asked("osprey", [6.0, 6.0], "prose")]
    found = check(
        only(decide(measurement(*results), costs(limits={"max_slice_regression": 0.1}))), "max_slice_regression"
    )
    assert (found["where"], found["measured"], found["passed"]) == ("prose", pytest.approx(0.2), False)


def test_a_set_without_success_is_the_dearest():
    """No cost is worse than any."""
    dead = asked("osprey", []) | {"prompts": "prose", "failures": [failure("prose0", 1.0)], "busy_seconds": 1.0}
    results = [OFF, HALF, asked("off", [5.0], "prose"), dead]
    limits = {"max_slice_regression": 9}
    found = check(only(decide(measurement(*results), costs(limits=limits))), "max_slice_regression")
    assert (found["where"], found["measured"], found["passed"]) == ("prose", None, False)


def test_a_limit_that_is_reached_is_kept():
    """Also where a sum of binary fractions misses it by a hair: 19 of 20 are 95%."""
    arm = with_requests(asked("osprey", [5.0] * 20), matches_off=[True] * 19 + [False])
    results = measurement(asked("off", [10.0] * 20), arm)
    for least, kept in ((0.95, True), (0.9501, False)):
        drafter = only(decide(results, costs(limits={"min_share_equal_to_off": least})))
        assert check(drafter, "min_share_equal_to_off")["passed"] == kept


def test_texts_that_were_not_compared_are_in_no_share():
    """One of four has none to be compared with; one whose first token was not timed has no place in that p95."""
    arm = with_requests(HALF, matches_off=[True, True, False, None], time_to_first_token=[0.1, 0.2, 0.3, None])
    drafter = only(decide(measurement(OFF, arm), costs()))
    assert drafter["equal"]["value"] == pytest.approx(2 / 3)
    assert (drafter["counts"]["equal"], drafter["counts"]["compared"]) == (2, 3)
    assert drafter["p95_time_to_first_token"]["value"] == 0.3
    assert drafter["time_to_first_token"]["value"] == pytest.approx(0.2)


def test_what_was_not_measured_does_not_pass():
    """A limit on the texts cannot be kept by an arm whose texts were compared with nothing."""
    arm = with_requests(HALF, matches_off=[None] * 4)
    drafter = only(decide(measurement(OFF, arm), costs(limits={"min_share_equal_to_off": 0.5})))
    found = check(drafter, "min_share_equal_to_off")
    assert (found["measured"], found["passed"], drafter["keep"]) == (None, False, False)


def test_a_limit_near_the_measured_value_is_in_doubt():
    """Two of forty requests take longer than 5.5 s, which may be chance: kept or broken, the sample cannot tell."""
    results = [asked("off", [10.0] * 40), asked("osprey", [5.0] * 38 + [6.0] * 2)]
    for limit, keep, certain in ((5.5, True, False), (4.9, False, True), (7, True, True)):
        drafter = only(decide(measurement(*results), costs(limits={"p95_seconds": limit})))
        assert (drafter["keep"], drafter["certain"]) == (keep, certain)


def test_one_limit_broken_for_certain_is_enough():
    """That another is broken in doubt leaves no doubt about discarding."""
    results = measurement(asked("off", [10.0] * 40), asked("osprey", [5.0] * 37 + [6.0] * 3))
    limits = {"p95_seconds": 5.5, "p95_time_to_first_token": 0.05}
    drafter = only(decide(results, costs(limits=limits)))
    assert [check(drafter, key)["passed"] for key in limits] == [False, False]
    assert [check(drafter, key)["certain"] for key in limits] == [False, True]
    assert (drafter["keep"], drafter["certain"]) == (False, True)


def test_few_prompts_are_never_certain():
    """Nineteen prompts, all alike, have intervals of no width, which is not what they prove."""
    for count, certain in ((19, False), (20, True)):
        arms = [asked("off", [10.0] * count), asked("osprey", [5.0] * count)]
        assert only(decide(measurement(*arms), costs()))["certain"] == certain


def test_no_failure_in_four_is_no_proof():
    """No resample of four successes has a failure, yet up to 60% could fail; all of them kept a limit of none."""
    drafter = only(decide(measurement(OFF, HALF), costs(limits={"max_failure_share": 0.1})))
    found = check(drafter, "max_failure_share")
    assert found["interval"] == pytest.approx([0, 1 - 0.025**0.25])
    assert found["passed"] and not found["certain"]
    # Two prompts that are half of the traffic count for less than two: 1 / (1/4 / 4 + 1/4 / 2) = 5.33.
    results = [OFF, HALF, asked("off", [5.0] * 2, "prose"), asked("osprey", [4.0] * 2, "prose")]
    drafter = only(decide(measurement(*results), costs(mix={"code": 0.5, "prose": 0.5})))
    assert drafter["failures"]["interval"] == pytest.approx([0, 1 - 0.025 ** (3 / 16)])
    drafter = only(decide(measurement(OFF, HALF), costs(limits={"max_failure_share": 0, "min_share_equal_to_off": 1})))
    assert all(row["certain"] for row in drafter["checks"] if row["limit"] is not None)


def test_a_drafter_that_never_answers():
    """Everything is undefined, nothing is NaN, and it is discarded for certain."""
    dead = asked("osprey", []) | {"failures": [failure(f"code{i}", 3.0) for i in range(20)], "busy_seconds": 60.0}
    decision = decide(measurement(asked("off", [10.0] * 20), dead), costs())
    json.dumps(decision, allow_nan=False)
    drafter = only(decision)
    assert (drafter["cost"]["value"], drafter["failures"]["value"]) == (None, 1.0)
    assert (drafter["keep"], drafter["certain"], decision["best"]) == (False, True, "off")
    assert decision["failures"] == [{"arm": "osprey", "reason": "HTTP 500", "requests": 20}]


def test_best_of_those_kept():
    """The largest sum left at the end of the horizon, not the largest saving on a request; the next one is named."""
    hours = {"preparation_gpu_hours": 0, "adaptation_gpu_hours": {"dear": 1000, "cheap": 1, "slow": 0}}
    arms = [asked("dear", [4.0] * 4), asked("cheap", [5.0] * 4), asked("slow", [12.0] * 4)]
    decision = decide(measurement(OFF, *arms), costs(**hours, requests_per_month=100_000))
    assert [drafter["keep"] for drafter in decision["drafters"]] == [True, True, False]
    assert (decision["best"], decision["runner_up"]["arm"]) == ("cheap", "dear")
    assert decision["runner_up"]["cheaper"]["value"] == pytest.approx(-0.001)
