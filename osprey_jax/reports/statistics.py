"""Means, ratios and percentiles over requests, with intervals that say how far the sample can be trusted.

Intervals are 95% percentile intervals of the bootstrap. What is drawn again is a conversation, whole: the turns of one
depend on each other. Draws depend on the seed and the number of conversations alone, so that two arms asked the same
prompts see the same draws.

Axes: N resamples, C conversations, R requests, K columns.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from osprey_jax.command import UserError

Interval = list[float] | None  # [low, high]; None where the sample says nothing
Requests = Sequence[dict[str, Any]]  # the `requests` of a result of `evaluate`

RESAMPLES = 10_000
FEW = 20  # conversations, of which an interval of a mean holds the truth 92 times in 100; of 10 it does 89, of 5 82
TIMES = ("seconds", "time_to_first_token", "milliseconds_per_token")  # measures of a server's requests
_DRAWN_AT_ONCE = 2**17  # conversations: 1 MiB, which caches hold


class Key(NamedTuple):
    """What a request is known by in every arm."""

    id: str
    turn: int


def summarize(requests: Requests, seed: int, busy_seconds: float | None = None) -> dict[str, Any]:
    """What the requests of one arm on one prompt set come to, flat; None where nothing was measured.

    Two accepted lengths: `accepted_length` is the mean over requests, `tokens_per_verification` the ratio of the sums.
    Requests that ended by their first token were never verified: they are in neither, and counted.
    """
    counted = [request for request in requests if request["verifications"] is not None]
    verified = [request for request in counted if request["verifications"]]
    tokens = sum(request["completion_tokens"] for request in requests)
    summary: dict[str, Any] = {
        "requests": len(requests),
        "without_verification": len(counted) - len(verified) if counted else None,
        "accepted_length": _mean([request["accepted_length"] for request in verified]),
        "accepted_length_interval": mean_interval(verified, "accepted_length", seed),
        "tokens_per_verification": _ratio(
            sum(request["completion_tokens"] for request in verified),
            sum(request["verifications"] for request in verified),
        ),
        "tokens_per_verification_interval": ratio_interval(verified, "completion_tokens", "verifications", seed),
        "prompt_tokens": sum(request["prompt_tokens"] for request in requests),
        "completion_tokens": tokens,
        "verifications": sum(request["verifications"] for request in counted) if counted else None,
        "ended_by_limit": sum(request["finish_reason"] == "length" for request in requests),
    }
    for measure in TIMES:
        timed = [request for request in requests if request[measure] is not None]
        values = [request[measure] for request in timed]
        summary |= {
            f"{measure}_mean": _mean(values),
            f"{measure}_interval": mean_interval(timed, measure, seed),
            f"{measure}_p50": percentile(values, 0.5),
            f"{measure}_p95": percentile(values, 0.95),
        }
    return summary | {"throughput": tokens / busy_seconds if busy_seconds else None}  # completion tokens a second


def mean_interval(requests: Requests, measure: str, seed: int) -> Interval:
    """Of the mean of a measure that all `requests` have."""
    return _interval_of_ratio(requests, [(request[measure], 1) for request in requests], seed)


def ratio_interval(requests: Requests, numerator: str, denominator: str, seed: int) -> Interval:
    """Of the ratio of two measures' sums."""
    return _interval_of_ratio(requests, [(request[numerator], request[denominator]) for request in requests], seed)


def paired(arm: Requests, against: Requests, measure: str, seed: int) -> dict[str, Any]:
    """The mean difference, arm - against, of a measure on the prompts that both have, with its paired interval.

    Returns: `requests` compared; `arm_mean`, `against_mean`, `difference` and its `low` and `high`, None where nothing
    can be compared; `only_arm` and `only_against`, requests that the other lacks; `without_value`, requests of both of
    which one has no such measure. None of these three is in a mean.

    Raises:
      UserError: a request that appears twice.
    """
    ours, theirs = by_key(arm), by_key(against)
    common = [key for key in ours if key in theirs]
    pairs = [(key, ours[key][measure], theirs[key][measure]) for key in common]
    pairs = [(key, mine, other) for key, mine, other in pairs if mine is not None and other is not None]
    differences = [{"id": key.id, "difference": mine - other} for key, mine, other in pairs]
    low, high = mean_interval(differences, "difference", seed) or (None, None)
    return {
        "requests": len(pairs),
        "only_arm": len(ours) - len(common),
        "only_against": len(theirs) - len(common),
        "without_value": len(common) - len(pairs),
        "arm_mean": _mean([mine for _, mine, _ in pairs]),
        "against_mean": _mean([other for _, _, other in pairs]),
        "difference": _mean([row["difference"] for row in differences]),
        "low": low,
        "high": high,
    }


def by_key(requests: Iterable[dict[str, Any]]) -> dict[Key, dict[str, Any]]:
    """Requests, or failures, by what they are known by.

    Raises:
      UserError: two have one key, so that nobody could say which of another arm's is the same prompt.
    """
    requests = list(requests)
    count, key = 0, None
    for key, count in Counter(Key(request["id"], request["turn"]) for request in requests).most_common(1):
        if count > 1:
            raise UserError(f"request {key.id!r}, turn {key.turn}, is there {count} times; give each prompt its own id")
    return {Key(request["id"], request["turn"]): request for request in requests}


def percentile(values: Sequence[float], share: float, weights: Sequence[float] | None = None) -> float | None:
    """The smallest of `values` that at least `share` of them (by weight) do not exceed; None of none."""
    if not len(values):
        return None
    values_R = np.asarray(values, np.float64)
    weights_1xR = np.ones((1, len(values))) if weights is None else np.asarray([weights], np.float64)
    return float(percentiles(values_R, weights_1xR, share)[0])


def percentiles(values_R: np.ndarray, weights_NxR: np.ndarray, share: float) -> np.ndarray:
    """`percentile` under each of N weightings; NaN where all weights are 0."""
    order_R = np.argsort(values_R, kind="stable")
    below_NxR = np.cumsum(weights_NxR[:, order_R], axis=1)
    total_N = below_NxR[:, -1]
    # A relative allowance for sums that do not come out even: 19 of 20 equal weights are 95%.
    reached_NxR = below_NxR >= share * total_N[:, None] * (1 - 1e-9)
    return np.where(total_N > 0, values_R[order_R][reached_NxR.argmax(axis=1)], np.nan)


# ---- the bootstrap


def resample(conversations: Sequence[int], seed: int, statistic: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
    """`statistic` of each of `RESAMPLES` resamples, along the first axis.

    Args:
      conversations: how many each sample (prompt set) has; each is drawn from by itself, as many as there are.
      statistic: called with draws_NxC, how often each conversation was drawn, for some of the resamples at a time;
        the samples stand side by side.
    """
    generator = np.random.default_rng(seed)
    total = sum(conversations)
    at_once = max(_DRAWN_AT_ONCE // total, 1)
    starts = np.cumsum([0, *conversations[:-1]])
    found = []
    for first in range(0, RESAMPLES, at_once):
        rows = min(at_once, RESAMPLES - first)
        drawn_NxC = np.concatenate(
            [
                start + generator.integers(count, size=(rows, count))
                for start, count in zip(starts, conversations, strict=True)
            ],
            axis=1,
        )
        drawn_NxC += total * np.arange(rows)[:, None]
        counts = np.bincount(drawn_NxC.ravel(), minlength=rows * total)
        found.append(statistic(counts.reshape(rows, total).astype(np.float64)))
    return np.concatenate(found)


def interval(values_N: np.ndarray) -> Interval:
    """The middle 95% of a statistic's resamples; None where it is undefined in one (division by no request)."""
    if not np.isfinite(values_N).all():
        return None
    low, high = np.percentile(values_N, [2.5, 97.5])
    return [float(low), float(high)]


def conversation_sums(ids: Sequence[str], columns_RxK: np.ndarray, conversations: Sequence[str]) -> np.ndarray:
    """columns_CxK: each column summed over the requests of a conversation."""
    places = {name: i for i, name in enumerate(conversations)}
    sums_CxK = np.zeros((len(places), columns_RxK.shape[1]))
    np.add.at(sums_CxK, [places[name] for name in ids], columns_RxK)
    return sums_CxK


def _interval_of_ratio(requests: Requests, terms: Sequence[tuple[float, float]], seed: int) -> Interval:
    """Of the sum of the first terms / the sum of the second; None with less than two conversations."""
    ids = [request["id"] for request in requests]
    conversations = list(dict.fromkeys(ids))
    if len(conversations) < 2:
        return None
    sums_Cx2 = conversation_sums(ids, np.array(terms, np.float64), conversations)
    totals_Nx2 = resample([len(conversations)], seed, lambda draws_NxC: draws_NxC @ sums_Cx2)
    with np.errstate(invalid="ignore", divide="ignore"):
        return interval(totals_Nx2[:, 0] / totals_Nx2[:, 1])


def _mean(values: Sequence[float]) -> float | None:
    return float(np.mean(values)) if values else None


def _ratio(numerator: float, denominator: float) -> float | None:
    return numerator / denominator if denominator else None
