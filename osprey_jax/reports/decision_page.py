"""A decision (`reports/decision.py`) as a page that a person can send on: Markdown, or one HTML file."""

from pathlib import PurePath
from typing import Any

from osprey_jax.config import OFF
from osprey_jax.reports.caveats import caveats, few_conversations
from osprey_jax.reports.pages import Bar, Bars, Block, Bullets, Cell, Heading, Table, Text, Verdict
from osprey_jax.reports.pages import markdown as as_markdown
from osprey_jax.reports.pages import page as as_page
from osprey_jax.reports.provenance import given, measured_with
from osprey_jax.reports.statistics import RESAMPLES
from osprey_jax.reports.wording import (
    Show,
    amount,
    between,
    change,
    digits,
    excludes,
    money,
    months,
    number,
    seconds,
    share,
)

_REASONS = 10  # of failures that are listed


def markdown(decision: dict[str, Any]) -> str:
    """The page as Markdown."""
    return as_markdown(_blocks(decision))


def html(decision: dict[str, Any]) -> str:
    """The page as one HTML file: no script, nothing from elsewhere."""
    return as_page(_title(decision), _blocks(decision))


def _title(decision: dict[str, Any]) -> str:
    return f"Decision sheet: speculative decoding for {PurePath(decision['measured']['config']['target']).name}"


def _blocks(decision: dict[str, Any]) -> list[Block]:
    measured, level = decision["measured"], decision["level"]
    when = "" if measured["date"] is None else f"; measured {_day(measured['date'])}"
    return [
        Heading(_title(decision), 1),
        Text(f"{_hardware(decision)}; {_at_one_time(level)}{when}; decided {_day(decision['date'])}."),
        _verdict(decision),
        Heading("What each costs"),
        _costs(decision),
        Heading("Limits"),
        _limits(decision),
        Heading("By prompt set"),
        *_by_set(decision),
        Heading("Requests"),
        *_requests(decision),
        Heading("How the numbers are made"),
        Bullets(_method(decision)),
        Heading("What the numbers cannot say"),
        Bullets(caveats(decision)),
        Heading("Costs and limits given"),
        given(decision["costs"], decision["gpus"]),
        Heading("Measured with"),
        measured_with(decision),
    ]


# ---- the verdict


def _verdict(decision: dict[str, Any]) -> Verdict:
    best = next((row for row in decision["drafters"] if row["arm"] == decision["best"]), None)
    if best is None:
        reasons = [f"{row['arm']}: {_broken(row)}." for row in decision["drafters"]]
        certain = all(row["certain"] for row in decision["drafters"])
        sentences = reasons if certain else [*reasons, _doubt(decision, [])]
        line = "Stay with speculation off: no drafter is to be kept."
        return Verdict(line, "bad" if certain else "unsure", sentences)
    currency, costs = decision["costs"]["currency"], decision["costs"]
    ratio, off = best["cost_ratio"], decision["off"]["cost"]
    sentences = [
        f"A successful request costs {share(1 - ratio['value'])} less than with speculation off "
        f"({between(ratio['interval'], change)}): {money(currency, best['cost']['value'])} instead of "
        f"{money(currency, off['value'])}, which saves {money(currency, best['saving']['value'])}.",
        _paid_back(best, costs),
    ]
    if runner_up := decision["runner_up"]:
        cheaper = runner_up["cheaper"]
        seen = "" if excludes(cheaper["interval"], 0) else ", a difference that the sample cannot tell from none"
        per = money(currency, cheaper["value"])
        sentences.append(f"{runner_up['arm']} may be kept too; a request costs {per} more with it{seen}.")
    if not best["certain"]:
        doubtful = [_limit_words(check)[0] for check in best["checks"] if check["certain"] is False]
        sentences.append(_doubt(decision, doubtful))
    if unset := [_limit_words(check)[0] for check in best["checks"] if check["limit"] is None]:
        sentences.append(f"No limit was set on: {', '.join(unset)}.")
    return Verdict(f"Serve with {best['arm']}.", "good" if best["certain"] else "unsure", sentences)


def _doubt(decision: dict[str, Any], limits: list[str]) -> str:
    """Why a verdict is not certain: `limits` near which the sample cannot tell, or few prompts."""
    about = f" about: {', '.join(limits)}" if limits else ""
    few = few_conversations(decision)
    return f"The sample leaves doubt{about}{f' (few prompts: {few})' if few else ''}; more prompts would tell."


def _paid_back(best: dict[str, Any], costs: dict[str, Any]) -> str:
    currency, monthly = costs["currency"], costs["requests_per_month"]
    left = (
        f"{months(costs['months'])} of {number(monthly)} requests each leave {money(currency, best['net_saving'])} "
        f"({between(best['net_saving_interval'], amount)})."
    )
    if not best["one_off"]:
        return f"Nothing was spent once; {left}"
    requests = best["break_even_requests"]
    after = f"{number(requests)} requests, {months(requests / monthly)}"
    return f"The {money(currency, best['one_off'])} spent once are back after {after}; {left}"


def _broken(row: dict[str, Any]) -> str:
    found = []
    for check in row["checks"]:
        if check["passed"] is False:
            name, limit, shown = _limit_words(check)
            found.append(f"{name} {shown} ({limit})")
    return "; ".join(found)


# ---- tables


def _costs(decision: dict[str, Any]) -> Table:
    currency = decision["costs"]["currency"]
    rows: list[list[str | Cell]] = [[OFF, "–", _thousand(decision["off"]["cost"]), "–", "–", "–", "–"]]
    for row in decision["drafters"]:
        word = "keep" if row["keep"] else "discard"
        tone = ("good" if row["keep"] else "bad") if row["certain"] else "unsure"
        net = {"value": row["net_saving"], "interval": row["net_saving_interval"]}
        rows.append(
            [
                row["arm"],
                Cell(word if row["certain"] else f"{word}, in doubt", tone),
                _thousand(row["cost"]),
                _with_spread(row["cost_ratio"], change),
                amount(row["one_off"]),
                _break_even(row),
                _with_spread(net, amount),
            ]
        )
    header = ["arm", "verdict", f"cost of 1,000 successful requests, {currency}", "against off"]
    header += [f"spent once, {currency}", "paid back after requests"]
    return Table([*header, f"left after {months(decision['costs']['months'])}, {currency}"], rows)


def _break_even(row: dict[str, Any]) -> str | Cell:
    if row["break_even_requests"] is None:
        return "none: it saves nothing"
    return Cell(number(row["break_even_requests"]), note=between(row["break_even_interval"], number))


def _limits(decision: dict[str, Any]) -> Table:
    drafters = decision["drafters"]
    off = _of_off(decision)
    rows: list[list[str | Cell]] = []
    for i, check in enumerate(drafters[0]["checks"]):
        name, limit, _ = _limit_words(check)
        cells: list[str | Cell] = [name, limit, off.get(check["limit_key"], "–")]
        for drafter in drafters:
            cells.append(_checked(drafter["checks"][i]))
        rows.append(cells)
    return Table(["limit", "asked for", OFF, *(drafter["arm"] for drafter in drafters)], rows, words=True)


def _checked(check: dict[str, Any]) -> Cell:
    shown = _limit_words(check)[2]
    spread = between(check["interval"], _ENDS.get(check["limit_key"], _SHOWN[check["limit_key"]]), "never")
    note = "" if check["measured"] is None else spread
    if check["passed"] is None:
        return Cell(shown, note=note)
    word = "kept" if check["passed"] else "broken"
    if not check["certain"]:
        return Cell(f"{shown}: {word}, in doubt", "unsure", note)
    return Cell(f"{shown}: {word}", "good" if check["passed"] else "bad", note)


def _of_off(decision: dict[str, Any]) -> dict[str, str]:
    off = decision["off"]
    found = {key: off[key] for key in ("p95_seconds", "p95_time_to_first_token")}
    found["max_failure_share"] = off["failures"]
    return {key: f"{_SHOWN[key](figure['value'])}" for key, figure in found.items() if figure["value"] is not None}


def _by_set(decision: dict[str, Any]) -> list[Block]:
    bars = [
        Bar(
            row["prompts"] if len(decision["drafters"]) == 1 else f"{drafter['arm']}, {row['prompts']}",
            row["cost_ratio"]["value"],
            *(row["cost_ratio"]["interval"] or (None, None)),
            change(row["cost_ratio"]["value"]),
        )
        for drafter in decision["drafters"]
        for row in drafter["slices"]
        if row["cost_ratio"]["value"] is not None
    ]
    picture = Bars("Cost of a successful request against speculation off", bars, 1.0, "the same cost as off")
    blocks: list[Block] = [
        *([picture] if bars else []),
        Text('Cost, tokens and times are against off. "Not seen": the interval includes no difference.'),
    ]
    sizes = {part["prompts"]: part for part in decision["slices"]}
    for drafter in decision["drafters"]:
        rows: list[list[str | Cell]] = [
            [
                Cell(row["prompts"], note=f"{share(sizes[row['prompts']]['share'])} of the traffic"),
                number(sizes[row["prompts"]]["requests"]),
                _with_spread(row["accepted_length"], _two),
                _against(row["cost_ratio"], less_is_good=True),
                _against(row["throughput_ratio"], less_is_good=False),
                _against(row["seconds_ratio"], less_is_good=True),
                _against(row["time_to_first_token_ratio"], less_is_good=True),
            ]
            for row in drafter["slices"]
        ]
        header = ["prompt set", "requests", "accepted length", "cost", "tokens a busy second", "time to the end"]
        blocks += [Heading(drafter["arm"], 3), Table([*header, "time to the first token"], rows)]
    return blocks


def _requests(decision: dict[str, Any]) -> list[Block]:
    counted: list[list[str | Cell]] = []
    timed: list[list[str | Cell]] = []
    for arm in (decision["off"], *decision["drafters"]):
        counts = arm["counts"]
        compared = arm["arm"] != OFF and counts["compared"]
        equal = f"{number(counts['equal'])} of {number(counts['compared'])}" if compared else "–"
        numbers = [number(counts[key]) for key in ("asked", "successes", "failed", "late", "retried", "ended_by_limit")]
        counted.append([arm["arm"], *numbers, equal])
        times = [arm[key] for key in ("seconds", "p95_seconds", "time_to_first_token", "p95_time_to_first_token")]
        shown = [_with_spread(figure, digits) for figure in times]
        timed.append([arm["arm"], _with_spread(arm["throughput"], lambda rate: f"{rate:,.1f}"), *shown])
    header = ["arm", "asked", "successes", "failed", "too late", "retried", "cut by the limit", "equal to off's"]
    times = ["arm", "tokens a busy second", "seconds to the end: mean", "p95", "to the first token: mean", "p95"]
    blocks: list[Block] = [Table(header, counted), Table(times, timed)]
    if failures := decision["failures"]:
        listed: list[list[str | Cell]] = [
            [row["arm"], number(row["requests"]), row["reason"][:200]] for row in failures[:_REASONS]
        ]
        blocks += [Heading("Why requests failed", 3), Table(["arm", "requests", "reason"], listed, words=True)]
        if len(failures) > _REASONS:
            left = sum(row["requests"] for row in failures[_REASONS:])
            blocks.append(Text(f"And {number(left)} for {len(failures) - _REASONS} other reasons."))
    if differences := decision["differences"]:
        quoted: list[list[str | Cell]] = [
            [
                row["arm"],
                f"{row['prompts']}, {row['id']}" + (f", turn {row['turn'] + 1}" if row["turn"] else ""),
                number(row["token"]),
                _quoted(row["off"]),
                _quoted(row["this"]),
            ]
            for row in differences
        ]
        header = ["arm", "request", "from token", f"{OFF} goes on", "the arm goes on"]
        blocks += [Heading("Where texts part from off's: the first ones", 3), Table(header, quoted, words=True)]
    return blocks


# ---- words


_SHOWN: dict[str, Show] = {
    "months": lambda value: "never" if value is None else months(value),
    "p95_seconds": seconds,
    "p95_time_to_first_token": seconds,
    "min_share_equal_to_off": share,
    "max_failure_share": share,
    "max_slice_regression": lambda value: change(1 + value),
}
_ENDS: dict[str, Show] = {  # of the interval, where the unit need not be said again
    "months": lambda value: f"{value:.1f}",
    "p95_seconds": digits,
    "p95_time_to_first_token": digits,
}
_ASKED: dict[str, Show] = {
    "months": lambda limit: f"within {months(limit)}",
    "p95_seconds": lambda limit: f"within {limit:g} s",
    "p95_time_to_first_token": lambda limit: f"within {limit:g} s",
    "min_share_equal_to_off": lambda limit: f"at least {100 * limit:g}%",
    "max_failure_share": lambda limit: f"at most {100 * limit:g}%",
    "max_slice_regression": lambda limit: f"at most {100 * limit:g}% more",
}
_NAMES = {
    "months": "paid back",
    "p95_seconds": "time until 95% of the answers are complete",
    "p95_time_to_first_token": "time until 95% of the answers have begun",
    "min_share_equal_to_off": "answers equal to off's, token for token",
    "max_failure_share": "requests without success",
    "max_slice_regression": "cost of the dearest prompt set against off",
}


def _limit_words(check: dict[str, Any]) -> tuple[str, str, str]:
    """A limit's name, what it asks for, and what was measured."""
    key, limit, measured = check["limit_key"], check["limit"], check["measured"]
    asked = "not set" if limit is None else _ASKED[key](limit)
    shown = "not measured" if measured is None and key != "months" else _SHOWN[key](measured)
    where = "" if check["where"] is None or measured is None else f"{check['where']} "
    return _NAMES[key], asked, where + shown


def _method(decision: dict[str, Any]) -> list[str]:
    costs, off = decision["costs"], decision["off"]
    price = f"{decision['gpus']} x {money(costs['currency'], costs['gpu_hour_price'])} an hour"
    late = "" if costs["success_within"] is None else f" within {number(costs['success_within'])} s, retries included"
    mix = "what was measured" if costs["mix"] is None else "the mix that was given"
    return [
        f"Success: a request that was answered{late}; one that was cut by the limit of tokens counts too. What failed, "
        "came too late or was tried again is paid for all the same.",
        "Cost of a success: busy time x price / successes. Busy is the time in which any request ran, shared out among "
        "the requests by how long each ran, attempts that failed included.",
        f"Price of a busy hour: {price} / {1 - costs['idle_share']:g}, the share of the hours paid for that serve.",
        f"Prompt sets weigh as in {mix}: "
        + ", ".join(f"{part['prompts']} {share(part['share'])}" for part in decision["slices"])
        + ".",
        "Spent once: the GPU hours of preparation and adaptation x the price of one GPU hour. Paid back after: that / "
        "the saving on a success. Requests a month are successes.",
        "To the end and to the first token: as the user waits, lost attempts included. p95: the smallest time that 95% "
        "of the answers, by their weight, do not exceed.",
        "Accepted length: mean over requests of completion tokens / verifications.",
        "Ranges are 95% intervals by the bootstrap over conversations, with the same ones drawn for every arm "
        f"({number(RESAMPLES)} times, seed {decision['measured']['config']['seed']}); of shares of none or all by "
        "Clopper and Pearson.",
        f"Every arm was asked the same {number(off['counts']['asked'])} requests.",
    ]


def _hardware(decision: dict[str, Any]) -> str:
    hardware = decision["measured"]["hardware"] or {}
    if hardware.get("device") == "cpu":
        return f"On a CPU, not on the {decision['gpus']} GPU(s) that the price is of"
    return f"{decision['gpus']} x {hardware.get('gpu') or 'GPU of a kind not recorded'}"


def _at_one_time(level: int) -> str:
    return "one request at a time" if level == 1 else f"{level} requests at one time"


def _day(stamp: str) -> str:
    return stamp[:10]


def _quoted(text: str) -> str:
    return f"“{text}”".replace("\n", "↵")


def _two(value: float) -> str:
    return f"{value:.2f}"


def _thousand(cost: dict[str, Any]) -> str:
    return _with_spread(cost, lambda value: amount(1000 * value))


def _with_spread(figure: dict[str, Any], show: Show) -> str | Cell:
    return "–" if figure["value"] is None else Cell(show(figure["value"]), note=between(figure["interval"], show))


def _against(figure: dict[str, Any], *, less_is_good: bool) -> str | Cell:
    """A ratio to off as a change."""
    if figure["value"] is None:
        return "–"
    shown, note = change(figure["value"]), between(figure["interval"], change)
    if not excludes(figure["interval"], 1):
        return Cell(f"{shown}, not seen", note=note)
    return Cell(shown, "good" if (figure["value"] < 1) == less_is_good else "bad", note)
