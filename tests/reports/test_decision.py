"""Prices are such that a busy second costs 0.001: 3.6 an hour on one GPU that is never idle."""

import pytest

from osprey_jax.command import UserError
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
