"""What is kept of a request, and what a set of requests comes to."""

from collections.abc import Callable, Sequence
from typing import Any

from osprey_jax.evaluation.prompts import Item
from osprey_jax.reports.statistics import TIMES, summarize

_SHOWN = 12  # tokens of either text where two part


def facts(
    item: Item,
    token_ids: list[int],
    finish_reason: str,
    *,
    verifications: int | None,
    histogram: Sequence[int] | None,
    text: str,
    own_ids: list[int] | None,
    decode: Callable[[list[int]], str],
    times: dict[str, float | None] | None = None,
    attempts: int = 1,
    lost_seconds: float = 0.0,
) -> dict[str, Any]:
    """Of a request that was answered.

    Args:
      verifications, histogram: None without speculation.
      own_ids: what the target wrote without speculation; None where it is not known.
      times: by the names in `reports.statistics.TIMES`; None where they were not taken.
      lost_seconds: in attempts that failed.
    """
    times = times or dict.fromkeys(TIMES)
    return {
        **item.name,
        "prompt_tokens": len(item.request.prompt),
        "completion_tokens": len(token_ids),
        "verifications": verifications,
        "accepted_length": len(token_ids) / verifications if verifications else None,
        "histogram": None if histogram is None else list(histogram),
        "finish_reason": finish_reason,
        **times,
        # Of one request: parts that come together make it endless, so that no mean of it is taken.
        "decode_tokens_per_second": 1e3 / per_token if (per_token := times["milliseconds_per_token"]) else None,
        "attempts": attempts,
        "lost_seconds": lost_seconds,
        "matches_off": None if own_ids is None else token_ids == own_ids,
        "first_difference": None if own_ids is None else first_difference(own_ids, token_ids, decode),
        "text": text,
    }


def first_difference(
    own_ids: list[int], token_ids: list[int], decode: Callable[[list[int]], str]
) -> dict[str, Any] | None:
    """Where `token_ids` part from what the target writes alone, and how either goes on; None where they do not."""
    if token_ids == own_ids:
        return None
    pairs = enumerate(zip(own_ids, token_ids, strict=False))
    at = next((i for i, (own, this) in pairs if own != this), min(len(own_ids), len(token_ids)))
    end = at + _SHOWN
    return {"token": at, "off": decode(own_ids[at:end]), "this": decode(token_ids[at:end])}


def busy_seconds(intervals: Sequence[tuple[float, float]]) -> float:
    """How long at least one of the intervals (start, end) ran."""
    total, until = 0.0, float("-inf")
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total


def summary(result: dict[str, Any], seed: int) -> dict[str, Any]:
    """What an arm came to on a prompt set: `reports.statistics.summarize` and the counts beside it."""
    requests = result["requests"]
    histograms = [request["histogram"] for request in requests if request["histogram"] is not None]
    return {
        "arm": result["arm"],
        "prompts": result["prompts"],
        "concurrency": result["concurrency"],
        **summarize(requests, seed, result["busy_seconds"]),
        "busy_seconds": result["busy_seconds"],
        "failed": len(result["failures"]),
        "refused": sum(failure["refused"] for failure in result["failures"]),  # of those, for good
        "differing": sum(request["matches_off"] is False for request in requests),
        "example_difference": next(
            ({"id": r["id"]} | r["first_difference"] for r in requests if r["first_difference"]), None
        ),
        "not_compared": sum(request["matches_off"] is None for request in requests),
        "histogram": _summed(histograms) if histograms else None,
    }


def _summed(histograms: Sequence[Sequence[int]]) -> list[int]:
    """Counts by accepted drafts; SGLang leaves out the last ones where they are 0."""
    total = [0] * max(map(len, histograms), default=0)
    for histogram in histograms:
        for i, count in enumerate(histogram):
            total[i] += count
    return total
