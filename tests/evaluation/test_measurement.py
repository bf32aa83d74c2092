import pytest

from osprey_jax.evaluation.measurement import busy_seconds, first_difference, summary


def shown(ids):
    return " ".join(map(str, ids))


def test_the_first_difference():
    """Where two texts part, also where one only goes on."""
    assert first_difference([1, 2, 3], [1, 2, 3], shown) is None
    assert first_difference([1, 2, 3], [1, 5, 3], shown) == {"token": 1, "off": "2 3", "this": "5 3"}
    assert first_difference([1, 2], [1, 2, 3], shown) == {"token": 2, "off": "", "this": "3"}
    assert first_difference([*range(90)], [], shown)["off"] == shown(range(12))


@pytest.mark.parametrize(
    "intervals, wanted",
    [
        ([], 0),
        ([(1, 3)], 2),
        ([(1, 3), (2, 4)], 3),  # two at a time
        ([(1, 9), (2, 4)], 8),
        ([(7, 9), (1, 3)], 4),  # a pause between, as after an interrupt
    ],
)
def test_busy_seconds(intervals, wanted):
    """The time that somebody pays for: overlaps count once, pauses not at all."""
    assert busy_seconds(intervals) == wanted


def test_summary_counts():
    """Texts that differ, that could not be compared, requests that failed, histograms of unequal length."""
    request = {
        "id": "a", "turn": 0, "prompt_tokens": 3, "completion_tokens": 10, "verifications": 5, "accepted_length": 2.0,
        "histogram": [1, 4], "finish_reason": "length", "seconds": None, "time_to_first_token": None,
        "milliseconds_per_token": None, "matches_off": True, "first_difference": None,
    }  # fmt: skip
    other = request | {"id": "b", "histogram": [0, 0, 5], "matches_off": False, "first_difference": {"token": 1}}
    last = request | {"id": "c", "matches_off": None}
    result = {
        "arm": "d",
        "prompts": "p",
        "concurrency": 2,
        "busy_seconds": 6.0,
        "failures": [{"refused": True}, {"refused": False}],
    }
    found = summary(result | {"requests": [request, other, last]}, seed=0)
    assert (found["differing"], found["not_compared"], found["failed"], found["refused"]) == (1, 1, 2, 1)
    assert found["histogram"] == [2, 8, 5] and found["example_difference"] == {"id": "b", "token": 1}
    assert found["throughput"] == 5.0 and found["accepted_length"] == 2.0
