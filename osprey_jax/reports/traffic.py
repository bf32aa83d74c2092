"""What the requests of all arms at one level add up to, by conversation, and the figures of any weighting of them.

Figures and their intervals come from the same function: a figure is that of each conversation counted once, an interval
that of resamples. All arms were asked the same conversations and see the same resamples, so that a difference or ratio
of two arms is a paired one. Prompt sets are drawn from by themselves and weigh what they do in the traffic.

What a request costs is busy time of the server: the time in which any request ran, shared out by how long each ran,
attempts that failed included. At one request at a time that is its own time.

Axes: N resamples, C conversations, K columns, R requests that were answered.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from osprey_jax.command import UserError
from osprey_jax.config import OFF
from osprey_jax.reports.statistics import (
    Interval,
    Key,
    by_key,
    conversation_sums,
    interval,
    percentiles,
    resample,
)

# Sums over the requests of a conversation. `paid`: seconds of busy time; `waited`, `first`: what the user waits for the
# end and the first token, lost attempts included, and `begun` counts the latter; `compared` with off, `equal` to it.
_COLUMNS = ("paid", "success", "answered", "waited", "first", "begun", "tokens", "length", "verified")
_COLUMNS += ("compared", "equal")


class Figure(NamedTuple):
    """A number and its resamples; None where it is undefined (a division by no request)."""

    value: float | None
    samples_N: np.ndarray | None  # None where a set has a single conversation, which says nothing of the others

    @property
    def interval(self) -> Interval:
        return None if self.value is None or self.samples_N is None else interval(self.samples_N)

    def times(self, factor: float) -> "Figure":
        value = None if self.value is None else self.value * factor
        return Figure(value, None if self.samples_N is None else self.samples_N * factor)

    def minus(self, other: "Figure") -> "Figure":
        if self.value is None or other.value is None:
            return Figure(None, None)
        both = self.samples_N is not None and other.samples_N is not None
        return Figure(self.value - other.value, self.samples_N - other.samples_N if both else None)


@dataclasses.dataclass(frozen=True)
class Arm:
    """One arm on one prompt set.

    Attributes:
      sums_CxK: by conversation; K are `_COLUMNS`.
      place_R: the conversation of each answered request.
      waited_R, first_R: seconds until its end and its first token, lost attempts included; `first_R` NaN if unknown.
      counts: requests asked; of them successes, late and failed; of the answers retried, ended by the limit of tokens,
        compared with off's, equal to it.
      running: requests at one time, on average over the busy time; None without any.
    """

    sums_CxK: np.ndarray
    place_R: np.ndarray
    waited_R: np.ndarray
    first_R: np.ndarray
    counts: dict[str, int]
    running: float | None


@dataclasses.dataclass(frozen=True)
class Slice:
    """One prompt set: the conversations that every arm was asked.

    Attributes:
      wanted_C: the requests of each, those that were not reached after a failure included.
      left_out: conversations that some arm was never asked.
      share: of the traffic.
    """

    name: str
    conversations: list[str]
    wanted_C: np.ndarray
    left_out: int
    share: float
    arms: dict[str, Arm]


def slices(
    results: Sequence[dict[str, Any]], mix: Mapping[str, float] | None, success_within: float | None
) -> list[Slice]:
    """The prompt sets of `results` (of one level), each with all arms. `mix`: shares of the traffic; None: as measured.

    Raises:
      UserError: a set that an arm lacks, or that has no conversation which all were asked; requests without times.
    """
    arms = list(dict.fromkeys(result["arm"] for result in results))
    found = []
    for name in dict.fromkeys(result["prompts"] for result in results):
        by_arm = {result["arm"]: result for result in results if result["prompts"] == name}
        if missing := [arm for arm in arms if arm not in by_arm]:
            raise UserError(f"{name}: was not measured for {', '.join(missing)}; run the measurement to its end")
        found.append(_slice(name, {arm: by_arm[arm] for arm in arms}, success_within))
    total = sum(part.wanted_C.sum() for part in found)
    shares = {part.name: mix[part.name] if mix else part.wanted_C.sum() / total for part in found}
    return [dataclasses.replace(part, share=float(shares[part.name])) for part in found]


def figures(parts: Sequence[Slice], seed: int) -> dict[tuple[str, str | None, str], Figure]:
    """(arm, prompt set or None for all traffic, what) -> figure.

    Of both: `cost` (seconds of busy time a success), `throughput` (tokens a second of it), `accepted_length`, `seconds`
    and `time_to_first_token` (means), and but for `off` each but accepted length as `..._ratio` to off's. Of all
    traffic alone: `failures` (share of the requests without success), `equal` (share of the answers compared with
    off's that are the same), `p95_seconds`, `p95_time_to_first_token`.
    """
    sizes = [len(part.conversations) for part in parts]
    once = _weighted(parts, np.ones((1, sum(sizes))))
    samples_NxM = None
    if min(sizes) > 1:
        samples_NxM = resample(sizes, seed, lambda draws_NxC: np.stack([*_weighted(parts, draws_NxC).values()], 1))
    found = {}
    for i, (key, value) in enumerate(once.items()):
        known = float(value[0]) if np.isfinite(value[0]) else None
        found[key] = Figure(known, None if samples_NxM is None else samples_NxM[:, i])
    return found


# ---- sums


def _slice(name: str, by_arm: Mapping[str, dict[str, Any]], success_within: float | None) -> Slice:
    asked: dict[str, set[Key]] = {}
    for arm, result in by_arm.items():
        try:
            answered, failed = by_key(result["requests"]), by_key(result["failures"])
        except UserError as error:
            raise UserError(f"{arm} on {name}: {error}") from error
        asked[arm] = answered.keys() | failed.keys()
    everybody = set.intersection(*({key.id for key in keys} for keys in asked.values()))
    wanted = set.union(*asked.values())
    in_order = dict.fromkeys(record["id"] for result in by_arm.values() for record in result["requests"])
    in_order |= dict.fromkeys(record["id"] for result in by_arm.values() for record in result["failures"])
    conversations = [one for one in in_order if one in everybody]
    if not conversations:
        raise UserError(f"{name}: no prompt was asked of every arm; run the measurement to its end")
    turns = dict.fromkeys(conversations, 0)
    for key in wanted:
        if key.id in turns:
            turns[key.id] += 1
    wanted_C = np.array(list(turns.values()), np.float64)
    arms = {arm: _arm(name, result, conversations, wanted_C, success_within) for arm, result in by_arm.items()}
    return Slice(name, conversations, wanted_C, len(in_order) - len(conversations), 0.0, arms)


def _arm(
    name: str, result: dict[str, Any], conversations: list[str], wanted_C: np.ndarray, success_within: float | None
) -> Arm:
    requests, failures = result["requests"], result["failures"]
    if result["busy_seconds"] is None or any(request["seconds"] is None for request in requests):
        raise UserError(f"{result['arm']} on {name}: the results have no times; measure with engine: sglang")
    ran = sum(r["seconds"] + r["lost_seconds"] for r in requests) + sum(r["lost_seconds"] for r in failures)
    rate = result["busy_seconds"] / ran if ran else 0.0
    places = {one: i for i, one in enumerate(conversations)}
    requests = [request for request in requests if request["id"] in places]
    failures = [failure for failure in failures if failure["id"] in places]
    rows = [_columns(request, rate, success_within) for request in requests]
    rows += [dict.fromkeys(_COLUMNS, 0.0) | {"paid": rate * failure["lost_seconds"]} for failure in failures]
    columns_RxK = np.array([[row[column] for column in _COLUMNS] for row in rows], np.float64)
    sums_CxK = conversation_sums([record["id"] for record in (*requests, *failures)], columns_RxK, conversations)
    answered, asked = len(requests), int(wanted_C.sum())
    whole = dict(zip(_COLUMNS, sums_CxK.sum(0).tolist(), strict=True))
    return Arm(
        sums_CxK,
        place_R=np.array([places[request["id"]] for request in requests], np.int64),
        waited_R=np.array([row["waited"] for row in rows[:answered]]),
        first_R=np.array([row["first"] if row["begun"] else np.nan for row in rows[:answered]]),
        counts={
            "asked": asked,
            "successes": round(whole["success"]),
            "late": answered - round(whole["success"]),
            "failed": asked - answered,
            "retried": sum(request["attempts"] > 1 for request in requests),
            "ended_by_limit": sum(request["finish_reason"] == "length" for request in requests),
            "compared": round(whole["compared"]),
            "equal": round(whole["equal"]),
        },
        running=1 / rate if rate else None,
    )


def _columns(request: dict[str, Any], rate: float, success_within: float | None) -> dict[str, float]:
    """A request's part in each of `_COLUMNS`."""
    waited = request["seconds"] + request["lost_seconds"]
    begun = request["time_to_first_token"] is not None
    verified = bool(request["verifications"])
    return {
        "paid": rate * waited,
        "success": success_within is None or waited <= success_within,
        "answered": 1,
        "waited": waited,
        "first": request["time_to_first_token"] + request["lost_seconds"] if begun else 0.0,
        "begun": begun,
        "tokens": request["completion_tokens"],
        "length": request["accepted_length"] if verified else 0.0,
        "verified": verified,
        "compared": request["matches_off"] is not None,
        "equal": request["matches_off"] is True,
    }


# ---- figures

_RATIOS = ("cost", "seconds", "time_to_first_token", "throughput")


@np.errstate(divide="ignore", invalid="ignore")
def _weighted(parts: Sequence[Slice], draws_NxC: np.ndarray) -> dict[tuple[str, str | None, str], np.ndarray]:
    """Every figure for each weighting of the conversations; NaN or infinite where it is undefined."""
    found: dict[tuple[str, str | None, str], np.ndarray] = {}
    ends = np.cumsum([len(part.conversations) for part in parts])
    drawn = np.split(draws_NxC, ends[:-1], axis=1)
    for arm in parts[0].arms:
        overall_NxK, failures_N, waits, firsts, weights = 0.0, 0.0, [], [], []
        for part, draws in zip(parts, drawn, strict=True):
            this = part.arms[arm]
            totals_NxK = draws @ this.sums_CxK
            found |= {(arm, part.name, what): values for what, values in _means(totals_NxK).items()}
            wanted_N = draws @ part.wanted_C
            failures_N = failures_N + part.share * (1 - totals_NxK[:, _COLUMNS.index("success")] / wanted_N)
            each_N = part.share / wanted_N  # what one request weighs in the traffic
            overall_NxK = overall_NxK + totals_NxK * each_N[:, None]
            weights.append(draws[:, this.place_R] * each_N[:, None])
            waits.append(this.waited_R)
            firsts.append(this.first_R)
        found |= {(arm, None, what): values for what, values in _means(overall_NxK).items()}
        totals = dict(zip(_COLUMNS, overall_NxK.T, strict=True))
        found[arm, None, "failures"] = failures_N
        found[arm, None, "equal"] = totals["equal"] / totals["compared"]
        weights_NxR = np.concatenate(weights, axis=1)
        for what, values in (("p95_seconds", waits), ("p95_time_to_first_token", firsts)):
            found[arm, None, what] = _p95(np.concatenate(values), weights_NxR)
    for arm in parts[0].arms:
        for place in (*(part.name for part in parts), None):
            for what in _RATIOS if arm != OFF else ():
                found[arm, place, f"{what}_ratio"] = found[arm, place, what] / found[OFF, place, what]
    return found


def _means(totals_NxK: np.ndarray) -> dict[str, np.ndarray]:
    totals = dict(zip(_COLUMNS, totals_NxK.T, strict=True))
    return {
        "cost": totals["paid"] / totals["success"],
        "throughput": totals["tokens"] / totals["paid"],
        "accepted_length": totals["length"] / totals["verified"],
        "seconds": totals["waited"] / totals["answered"],
        "time_to_first_token": totals["first"] / totals["begun"],
    }


def _p95(values_R: np.ndarray, weights_NxR: np.ndarray) -> np.ndarray:
    known = ~np.isnan(values_R)
    if not known.any():
        return np.full(len(weights_NxR), np.nan)
    return percentiles(values_R[known], weights_NxR[:, known], 0.95)
