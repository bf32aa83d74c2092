"""What was measured, set beside the user's costs and limits: what each arm costs, and which drafters to keep."""

import datetime
import math
from collections.abc import Sequence
from typing import Any

from osprey_jax import __version__
from osprey_jax.command import UserError
from osprey_jax.config import OFF
from osprey_jax.reports.costs import DecisionConfig, check_names, one_off_hours
from osprey_jax.reports.statistics import FEW, Interval
from osprey_jax.reports.traffic import Arm, Figure, Slice, figures, slices

_ROUNDING = 1e-9  # by which a number may miss a limit that it reaches in exact arithmetic

Figures = dict[tuple[str, str | None, str], Figure]


def decide(results: dict[str, Any], costs: DecisionConfig) -> dict[str, Any]:
    """The decision for `results` (of `results.json`) as JSON values; money in the user's currency, for one success.

    An interval is None where the sample gives none; a figure is None where it is undefined.

    Raises:
      UserError: results without times, without speculation off or without the level decided at; a number of GPUs that
        nobody knows; costs that name what was not measured.
    """
    chosen = _chosen(results, costs)
    arms = list(dict.fromkeys(result["arm"] for result in chosen))
    drafters = [arm for arm in arms if arm != OFF]
    hours = one_off_hours(costs, drafters)
    if costs.mix is not None:
        check_names("mix", list(costs.mix), list(dict.fromkeys(result["prompts"] for result in chosen)))
    gpus = costs.gpus or _gpus(results)
    parts = slices(chosen, costs.mix, costs.success_within)
    found = figures(parts, results["config"]["seed"])
    if found[OFF, None, "cost"].value is None:
        raise UserError(f"{OFF}: no request succeeded, so that there is nothing to save on")
    price = costs.gpu_hour_price * gpus / 3600 / (1 - costs.idle_share)  # of a busy second
    judged = [_judged(arm, found, parts, costs, price, hours[arm] * costs.gpu_hour_price) for arm in drafters]
    kept = sorted((row for row in judged if row["keep"]), key=lambda row: -row["net_saving"])
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "osprey_jax": __version__,
        "best": kept[0]["arm"] if kept else OFF,
        "runner_up": _runner_up(kept, found, price),
        "level": costs.concurrency,
        "levels": list(dict.fromkeys(result["concurrency"] for result in results["results"])),
        "gpus": gpus,
        "costs": costs.model_dump(mode="json"),
        "off": _of_arm(OFF, found, parts, price),
        "drafters": judged,
        "slices": [
            {
                "prompts": part.name,
                "share": part.share,
                "conversations": len(part.conversations),
                "requests": int(part.wanted_C.sum()),
                "left_out": part.left_out,
            }
            for part in parts
        ],
        "failures": _failures(chosen),
        "differences": _differences(chosen, costs.examples),
        "measured": {key: results.get(key) for key in ("date", "engine", "versions", "hardware", "config")},
    }


# ---- what is decided on


def _chosen(results: dict[str, Any], costs: DecisionConfig) -> list[dict[str, Any]]:
    """The results of the level decided at."""
    if results.get("engine") != "sglang":
        raise UserError("the results were measured in this process, which times nothing; measure with engine: sglang")
    arms = {result["arm"] for result in results["results"]}
    if OFF not in arms:
        raise UserError(f"the results lack the arm {OFF}; measure the target without speculation too")
    if arms == {OFF}:
        raise UserError(f"the results have no arm but {OFF}; measure a drafter too")
    chosen = [result for result in results["results"] if result["concurrency"] == costs.concurrency]
    if not chosen:
        levels = dict.fromkeys(str(result["concurrency"]) for result in results["results"])
        raise UserError(f"concurrency {costs.concurrency} was not measured; there is {', '.join(levels)}")
    if missing := sorted(arms - {result["arm"] for result in chosen}):
        raise UserError(f"concurrency {costs.concurrency} was not measured for {', '.join(missing)}")
    return chosen


def _gpus(results: dict[str, Any]) -> int:
    hardware = results["hardware"]
    if hardware.get("device") == "cpu":
        raise UserError("the results were measured on a CPU; say in gpus how many GPUs the price is to be taken of")
    sizes = {
        arm: math.prod(told.get(key) or 1 for key in ("tp_size", "pp_size", "dp_size"))
        for arm, told in hardware.get("servers", {}).items()
    }
    if len(set(sizes.values())) > 1:
        several = ", ".join(f"{arm} {size}" for arm, size in sizes.items())
        raise UserError(f"the arms were served by different numbers of GPUs ({several}); serve all by the same")
    if not hardware.get("gpus"):
        raise UserError("the results do not say how many GPUs served; give gpus")
    return hardware["gpus"]


# ---- an arm


def _of_arm(arm: str, found: Figures, parts: Sequence[Slice], price: float) -> dict[str, Any]:
    """What can be said of an arm alone."""
    names = ("throughput", "accepted_length", "seconds", "time_to_first_token", "p95_seconds")
    names += ("p95_time_to_first_token",)
    alone: list[Arm] = [part.arms[arm] for part in parts]
    return {
        "arm": arm,
        "cost": _plain(found[arm, None, "cost"].times(price)),
        **{name: _plain(found[arm, None, name]) for name in names},
        **{name: _share(found[arm, None, name], parts) for name in ("failures", "equal")},
        "counts": {key: sum(one.counts[key] for one in alone) for key in alone[0].counts},
        "running": {part.name: one.running for part, one in zip(parts, alone, strict=True)},
    }


def _judged(
    arm: str, found: Figures, parts: Sequence[Slice], costs: DecisionConfig, price: float, one_off: float
) -> dict[str, Any]:
    """A drafter against off, and against the limits."""
    saving = found[OFF, None, "cost"].minus(found[arm, None, "cost"]).times(price)
    requests = costs.requests_per_month * costs.months
    net = _plain(saving.times(requests), minus=one_off)
    checks = [_pays(net, saving, one_off, costs), *_within_limits(arm, found, parts, costs)]
    asked = [check for check in checks if check["limit"] is not None]
    keep = all(check["passed"] for check in asked)
    enough = all(len(part.conversations) >= FEW for part in parts)
    return {
        **_of_arm(arm, found, parts, price),
        "keep": keep,
        # Whether the sample leaves no doubt: of all limits that are kept, or of one that is not.
        "certain": enough and (all if keep else any)(check["certain"] for check in asked if check["passed"] == keep),
        "saving": _plain(saving),
        "cost_ratio": _plain(found[arm, None, "cost_ratio"]),
        "one_off": one_off,
        "break_even_requests": _break_even(saving.value, one_off),
        "break_even_interval": _break_even_interval(saving.interval, one_off),
        "net_saving": net["value"],
        "net_saving_interval": net["interval"],
        "checks": checks,
        "slices": [
            {
                "prompts": part.name,
                "accepted_length": _plain(found[arm, part.name, "accepted_length"]),
                **{
                    name: _plain(found[arm, part.name, name])
                    for name in ("cost_ratio", "throughput_ratio", "seconds_ratio", "time_to_first_token_ratio")
                },
            }
            for part in parts
        ],
    }


def _runner_up(kept: Sequence[dict[str, Any]], found: Figures, price: float) -> dict[str, Any] | None:
    """The second best of those kept, and how much cheaper a success of the best is."""
    if len(kept) < 2:
        return None
    best, second = (row["arm"] for row in kept[:2])
    cheaper = found[second, None, "cost"].minus(found[best, None, "cost"]).times(price)
    return {"arm": second, "cheaper": _plain(cheaper)}


def _break_even(saving: float | None, one_off: float) -> int | None:
    """Successful requests after which a drafter has paid for itself; None: never."""
    return math.ceil(one_off / saving) if saving is not None and saving > 0 else None


def _break_even_interval(saving: Interval, one_off: float) -> list[int | None] | None:
    """[fewest, most], either None for never."""
    return None if saving is None else [_break_even(saving[1], one_off), _break_even(saving[0], one_off)]


# ---- limits


def _pays(net: dict[str, Any], saving: Figure, one_off: float, costs: DecisionConfig) -> dict[str, Any]:
    """Whether a drafter has paid for itself by the end of the horizon, which is measured in months."""

    def months(requests: int | None) -> float | None:
        return None if requests is None else requests / costs.requests_per_month

    spread = _break_even_interval(saving.interval, one_off)
    known = net["interval"]
    return {
        "limit_key": "months",
        "limit": costs.months,
        "measured": months(_break_even(saving.value, one_off)),
        "interval": None if spread is None else [months(requests) for requests in spread],
        "where": None,
        "passed": net["value"] is not None and net["value"] > 0,
        "certain": net["value"] is None or (known is not None and (known[0] > 0 or known[1] <= 0)),
    }


def _within_limits(arm: str, found: Figures, parts: Sequence[Slice], costs: DecisionConfig) -> list[dict[str, Any]]:
    limits = costs.limits
    ratios = {part.name: found[arm, part.name, "cost_ratio"] for part in parts}
    dearest = max(ratios, key=lambda name: math.inf if ratios[name].value is None else ratios[name].value)
    return [
        _check("p95_seconds", limits.p95_seconds, _plain(found[arm, None, "p95_seconds"])),
        _check(
            "p95_time_to_first_token",
            limits.p95_time_to_first_token,
            _plain(found[arm, None, "p95_time_to_first_token"]),
        ),
        _check(
            "min_share_equal_to_off",
            limits.min_share_equal_to_off,
            _share(found[arm, None, "equal"], parts),
            least=True,
        ),
        _check("max_failure_share", limits.max_failure_share, _share(found[arm, None, "failures"], parts)),
        _check("max_slice_regression", limits.max_slice_regression, _plain(ratios[dearest], minus=1.0), where=dearest),
    ]


def _check(
    key: str, limit: float | None, measured: dict[str, Any], *, least: bool = False, where: str | None = None
) -> dict[str, Any]:
    """A measured number beside its limit, which it may reach; what was not measured does not pass.

    `least`: the limit is the smallest number allowed, not the largest. `certain`: all of the interval is on one side;
    a limit that asks for every request, or for none, is certain where all that were measured keep it.
    """

    def keeps(value: float) -> bool:
        return value >= limit - _ROUNDING if least else value <= limit + _ROUNDING

    value, spread = measured["value"], measured["interval"]
    passed = None if limit is None else value is not None and keeps(value)
    if limit is None:
        certain = None
    elif value is None or value == limit == (1 if least else 0):
        certain = True
    else:
        certain = spread is not None and keeps(spread[0]) == keeps(spread[1])
    return {
        "limit_key": key,
        "limit": limit,
        "measured": value,
        "interval": spread,
        "where": where,
        "passed": passed,
        "certain": certain,
    }


# ---- what else a reader wants to see


def _failures(chosen: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """How often each reason, by arm; the commonest first."""
    counts: dict[tuple[str, str], int] = {}
    for result in chosen:
        for failure in result["failures"]:
            key = (result["arm"], failure["reason"])
            counts[key] = counts.get(key, 0) + 1
    in_order = sorted(counts.items(), key=lambda item: -item[1])
    return [{"arm": arm, "reason": reason, "requests": count} for (arm, reason), count in in_order]


def _differences(chosen: Sequence[dict[str, Any]], examples: int) -> list[dict[str, Any]]:
    """Of each drafter, the first texts that are not off's, and where they part."""
    found: dict[str, list[dict[str, Any]]] = {}
    for result in chosen:
        of_arm = found.setdefault(result["arm"], [])
        for request in result["requests"]:
            if request["first_difference"] is not None and result["arm"] != OFF and len(of_arm) < examples:
                names = {"arm": result["arm"], "prompts": result["prompts"], "id": request["id"]}
                of_arm.append(names | {"turn": request["turn"]} | request["first_difference"])
    return [difference for of_arm in found.values() for difference in of_arm]


def _plain(figure: Figure, minus: float = 0.0) -> dict[str, Any]:
    """A figure as JSON values, less a constant."""
    value, spread = figure.value, figure.interval
    return {
        "value": None if value is None else value - minus,
        "interval": None if spread is None else [end - minus for end in spread],
    }


def _share(figure: Figure, parts: Sequence[Slice]) -> dict[str, Any]:
    """As `_plain`, of a share. Of none or all, no resample differs: the interval is then Clopper and Pearson's, of as
    many conversations as the weights of the prompt sets leave."""
    shown = _plain(figure)
    if figure.value in (0, 1) and shown["interval"] is not None:
        counted = 1 / sum(part.share**2 / len(part.conversations) for part in parts)
        unseen = 1 - 0.025 ** (1 / counted)
        shown["interval"] = [0.0, unseen] if figure.value == 0 else [1 - unseen, 1.0]
    return shown
