"""Prices are such that a busy second costs 0.001: 3.6 an hour on one GPU that is never idle."""

import json

import pytest

from osprey_jax.command import UserError
from osprey_jax.reports.costs import DecisionConfig, Limits
from osprey_jax.reports.decision import decide
from tests.reports.measured_results import asked, busy, failure, measurement, request

OFF = asked("off", [8.0, 12.0, 10.0, 10.0])
HALF = asked("osprey", [4.0, 6.0, 5.0, 5.0])


def costs(**fields):
    given = {
        "gpu_hour_price": 3.6,
        "preparation_gpu_hours": 6,
        "adaptation_gpu_hours": 4,
        "idle_share": 0,
        "requests_per_month": 3600,
        "months": 12,
        "concurrency": 1,
    }
    return DecisionConfig(**given | fields)


def only(decision):
    [drafter] = decision["drafters"]
    return drafter


def check(drafter, key):
    return next(row for row in drafter["checks"] if row["limit_key"] == key)


def with_requests(result, **changes):
    """`result` with other values in its requests, by position."""
    requests = [dict(r) for r in result["requests"]]
    for key, values in changes.items():
        for one, value in zip(requests, values, strict=True):
            one[key] = value
    return busy(result | {"requests": requests})


# ---- money


def test_costs_by_hand():
    """10 busy seconds a success against 5; 36 spent once are back after 7,200 requests, which are two months."""
    decision = decide(measurement(OFF, HALF), costs())
    drafter = only(decision)
    assert decision["off"]["cost"]["value"] == pytest.approx(0.010)
    assert drafter["cost"]["value"] == pytest.approx(0.005)
    assert drafter["saving"]["value"] == pytest.approx(0.005)
    assert drafter["cost_ratio"]["value"] == pytest.approx(0.5)
    assert drafter["one_off"] == pytest.approx(36)
    assert drafter["break_even_requests"] == 7200
    assert check(drafter, "months")["measured"] == 2
    assert drafter["net_saving"] == pytest.approx(0.005 * 3600 * 12 - 36)
    assert (drafter["keep"], decision["best"]) == (True, "osprey")


def test_idle_time_and_gpus_are_paid():
    """Two GPUs of which half the time serves nobody cost four times as much, and save four times as much."""
    drafter = only(decide(measurement(OFF, HALF), costs(idle_share=0.5, gpus=2)))
    assert drafter["cost"]["value"] == pytest.approx(0.020)
    assert drafter["saving"]["value"] == pytest.approx(0.020)
    assert drafter["one_off"] == pytest.approx(36), "hours of training are GPU hours already"


def test_failures_and_retries_are_paid_by_the_successes():
    """A failed request's 9 s and a retry's 1 s are busy time like any other."""
    broken = asked("osprey", [4.0, 6.0, 5.0]) | {"failures": [failure("code3", 9.0)]}
    broken["requests"][0] |= {"attempts": 2, "lost_seconds": 1.0}
    drafter = only(decide(measurement(OFF, busy(broken)), costs()))
    assert drafter["cost"]["value"] == pytest.approx(0.001 * (15 + 1 + 9) / 3)
    assert drafter["failures"]["value"] == pytest.approx(0.25)
    assert drafter["counts"] == {
        "asked": 4,
        "successes": 3,
        "late": 0,
        "failed": 1,
        "retried": 1,
        "ended_by_limit": 0,
        "compared": 3,
        "equal": 3,
    }


def test_an_answer_that_came_too_late_is_no_success():
    """It is paid for, and what the user waits includes attempts that were lost."""
    slow = with_requests(HALF, lost_seconds=[0.0, 0.0, 2.0, 0.0], attempts=[1, 1, 2, 1])
    drafter = only(decide(measurement(asked("off", [5.0] * 4), slow), costs(success_within=5.5)))
    assert (drafter["counts"]["successes"], drafter["counts"]["late"]) == (2, 2)
    assert drafter["cost"]["value"] == pytest.approx(0.001 * 22 / 2)
    assert drafter["failures"]["value"] == 0.5
    on_time = only(decide(measurement(asked("off", [5.0] * 4), slow), costs(success_within=6)))
    assert on_time["counts"]["late"] == 1, "6 s are within 6 s"


def test_busy_time_is_shared_under_load():
    """Requests that ran together share the server's time by how long each ran."""
    off, arm = (asked(name, [8.0, 12.0, 10.0, 10.0], level=4) for name in ("off", "osprey"))
    drafter = only(decide(measurement(off, arm), costs(concurrency=4)))
    assert drafter["cost"]["value"] == pytest.approx(0.001 * 10 / 4)
    assert drafter["running"] == {"code": pytest.approx(4)}
    assert drafter["throughput"]["value"] == pytest.approx(4 * 10), "100 tokens in 10 s, four of them together"


def test_sets_weigh_as_measured_or_as_given():
    """Four requests of code at 10 s and one of prose at 30 s: 14 s on average, or 20 s where half of all is prose."""
    off = [OFF, asked("off", [30.0], "prose")]
    arm = [HALF, asked("osprey", [15.0], "prose")]
    decision = decide(measurement(*off, *arm), costs())
    assert decision["off"]["cost"]["value"] == pytest.approx(0.014)
    assert [part["share"] for part in decision["slices"]] == [0.8, 0.2]
    decision = decide(measurement(*off, *arm), costs(mix={"code": 0.5, "prose": 0.5}))
    assert decision["off"]["cost"]["value"] == pytest.approx(0.020)
    assert decision["off"]["p95_seconds"]["value"] == 30.0
    decision = decide(measurement(*off, *arm), costs(mix={"code": 0.96, "prose": 0.04}))
    assert decision["off"]["p95_seconds"]["value"] == 12.0, "prose is too rare to matter"


def test_mix_counts_successes_by_traffic():
    """Cost of a success over a mix is the mean cost of a request / the share that succeeds, not a mean of ratios."""
    prose = asked("osprey", [10.0]) | {"prompts": "prose", "failures": [failure("code1", 30.0)]}
    results = [OFF, HALF, asked("off", [1.0, 1.0]) | {"prompts": "prose"}, busy(prose)]
    drafter = only(decide(measurement(*results), costs(mix={"code": 0.75, "prose": 0.25})))
    assert drafter["cost"]["value"] == pytest.approx(0.001 * (0.75 * 5 + 0.25 * 20) / (0.75 * 1 + 0.25 * 0.5))
    assert drafter["failures"]["value"] == pytest.approx(0.25 * 0.5)


def test_hours_by_drafter():
    """A baseline from scratch has no backbone to prepare."""
    hours = {"preparation_gpu_hours": {"osprey": 100, "eagle": 0}, "adaptation_gpu_hours": {"osprey": 1, "eagle": 2}}
    decision = decide(measurement(OFF, HALF, asked("eagle", [5.0] * 4)), costs(**hours))
    assert [drafter["one_off"] for drafter in decision["drafters"]] == pytest.approx([363.6, 7.2])


def test_no_saving_never_breaks_even():
    """A slower drafter is discarded, whatever was spent, and off is the answer."""
    decision = decide(measurement(OFF, asked("osprey", [11.0] * 4)), costs())
    drafter = only(decision)
    assert drafter["break_even_requests"] is None
    assert check(drafter, "months")["measured"] is None and not check(drafter, "months")["passed"]
    assert (drafter["keep"], decision["best"]) == (False, "off")


def test_a_saving_too_small_for_the_horizon():
    """It would pay back after two months, of which one is left."""
    drafter = only(decide(measurement(OFF, HALF), costs(months=1)))
    assert (drafter["break_even_requests"], drafter["keep"]) == (7200, False)
    assert drafter["net_saving"] == pytest.approx(18 - 36)


def test_break_even_is_the_request_after_which_nothing_is_left():
    """36 spent at 0.007 a success are back with the 5,143rd, not with the one before."""
    drafter = only(decide(measurement(OFF, asked("osprey", [3.0] * 4)), costs()))
    assert drafter["break_even_requests"] == 5143 == int(36 / 0.007) + 1


def test_same_drafter_saves_nothing():
    """An arm that is as fast as off: no difference, and an interval of no width."""
    drafter = only(decide(measurement(OFF, asked("osprey", [8.0, 12.0, 10.0, 10.0])), costs()))
    assert drafter["saving"] == {"value": 0.0, "interval": [0.0, 0.0]}
    assert drafter["cost_ratio"] == {"value": 1.0, "interval": [1.0, 1.0]}


# ---- intervals


def test_saving_is_paired():
    """Prompts differ by a factor of ten, the saving on each is one half: its relative interval has no width."""
    seconds = [1.0, 10.0, 2.0, 8.0, 3.0, 5.0]
    decision = decide(
        measurement(asked("off", seconds), asked("osprey", [s / 2 for s in seconds])), costs(preparation_gpu_hours=0)
    )
    drafter = only(decision)
    assert drafter["cost_ratio"]["interval"] == pytest.approx([0.5, 0.5])
    low, high = decision["off"]["cost"]["interval"]
    assert high - low > 0.003
    assert drafter["saving"]["interval"] == pytest.approx([low / 2, high / 2])
    assert drafter["break_even_interval"] == [
        pytest.approx(14.4 / (high / 2), abs=1),
        pytest.approx(14.4 / (low / 2), abs=1),
    ]


def test_doubt_about_the_saving():
    """Where the interval includes no saving, that end of the break-even is none, and the verdict is unsure."""
    arm = asked("osprey", [2.0, 13.0, 4.0, 14.0])
    drafter = only(decide(measurement(OFF, arm), costs(preparation_gpu_hours=0, adaptation_gpu_hours=0)))
    assert drafter["keep"] and not drafter["certain"]
    assert drafter["saving"]["interval"][0] < 0 < drafter["saving"]["value"]
    assert drafter["break_even_interval"] == [0, None]


def test_one_conversation_gives_no_interval():
    """The figures stay, the verdict is in doubt."""
    drafter = only(decide(measurement(asked("off", [10.0]), asked("osprey", [1.0])), costs()))
    assert drafter["keep"] and not drafter["certain"]
    assert drafter["saving"]["value"] == pytest.approx(0.009)
    assert drafter["saving"]["interval"] is None and drafter["break_even_interval"] is None


def test_seed_reproduces():
    """The sheet of the same results is the same, digit for digit; another seed moves the intervals."""
    off, arm = asked("off", [float(i) for i in range(1, 31)]), asked("osprey", [1 + i**0.5 for i in range(30)])
    first, again = (only(decide(measurement(off, arm), costs())) for _ in range(2))
    assert first == again
    other = measurement(off, arm)
    other["config"] = other["config"] | {"seed": 1}
    moved = only(decide(other, costs()))
    assert moved["saving"]["value"] == first["saving"]["value"]
    assert moved["cost"]["interval"] != first["cost"]["interval"]


# ---- limits

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


# ---- what is compared


def test_conversations_that_an_arm_was_not_asked_are_left_out_for_all():
    """A measurement that was stopped compares what it has; the time of the rest is not paid by the few."""
    decision = decide(measurement(OFF, asked("osprey", [4.0, 6.0])), costs())
    assert decision["slices"][0]["left_out"] == 2
    assert decision["off"]["cost"]["value"] == pytest.approx(0.010)
    assert only(decision)["counts"]["asked"] == 2


def test_turns_not_reached_after_a_failure_are_no_successes():
    """Off answered two turns, the drafter failed at the first: two requests were wanted of it."""
    off = asked("off", [1.0, 1.0]) | {"requests": [request("a", 1.0), request("a", 1.0, turn=1), request("b", 1.0)]}
    arm = asked("osprey", [1.0]) | {"requests": [request("b", 1.0)], "failures": [failure("a", 0.5)]}
    drafter = only(decide(measurement(busy(off), busy(arm)), costs()))
    assert (drafter["counts"]["asked"], drafter["counts"]["failed"]) == (3, 2)
    assert drafter["failures"]["value"] == pytest.approx(2 / 3)


def test_differences_are_quoted_as_many_as_asked_for():
    """The first texts that part from off's, of each drafter."""
    parts = {"token": 3, "off": "a", "this": "b"}
    arm = with_requests(HALF, first_difference=[None, parts, parts, parts], matches_off=[True, False, False, False])
    decision = decide(measurement(OFF, arm), costs(examples=2))
    assert [(row["id"], row["token"]) for row in decision["differences"]] == [("code1", 3), ("code2", 3)]
    assert decide(measurement(OFF, arm), costs(examples=0))["differences"] == []


@pytest.mark.parametrize(
    ("results", "given", "words"),
    [
        (measurement(OFF, HALF, engine="in_process"), {}, "which times nothing"),
        (measurement(HALF), {}, "lack the arm off"),
        (measurement(OFF), {}, "no arm but off"),
        (measurement(OFF, HALF), {"concurrency": 8}, "concurrency 8 was not measured; there is 1"),
        (
            measurement(OFF, HALF, asked("off", [1.0], level=8)),
            {"concurrency": 8},
            "concurrency 8 was not measured for osprey",
        ),
        (measurement(OFF, HALF, asked("off", [1.0], "prose")), {}, "prose: was not measured for osprey"),
        (measurement(OFF, HALF | {"busy_seconds": None}), {}, "osprey on code: the results have no times"),
        (measurement(OFF, HALF, hardware={"device": "cpu", "gpus": None}), {}, "measured on a CPU; say in gpus"),
        (measurement(OFF, HALF, hardware={"device": "cuda", "gpus": None}), {}, "how many GPUs served; give gpus"),
        (
            measurement(
                OFF,
                HALF,
                hardware={"device": "cuda", "gpus": 2, "servers": {"off": {"tp_size": 2}, "osprey": {"tp_size": 1}}},
            ),
            {},
            r"different numbers of GPUs \(off 2, osprey 1\)",
        ),
        (measurement(OFF, HALF), {"mix": {"prose": 1.0}}, "mix: prose was not measured; there are code"),
        (measurement(OFF, HALF), {"adaptation_gpu_hours": {}}, "adaptation_gpu_hours: lacks osprey"),
        (measurement(OFF, HALF), {"success_within": 0.5}, "off: no request succeeded"),
        (measurement(OFF, asked("osprey", [1.0], "code")), {}, None),
    ],
)
def test_unusable(results, given, words):
    """What cannot be decided is one line that says what is missing."""
    if words is None:
        results["results"][1]["requests"][0]["id"] = "other"
        words = "code: no prompt was asked of every arm"
    with pytest.raises(UserError, match=words):
        decide(results, costs(**given))
