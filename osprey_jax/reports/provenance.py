"""What a decision was made of: the costs that were given, and what measured."""

import json
import re
from typing import Any

from osprey_jax.reports.pages import Cell, Table

_SECRET = re.compile(r"key|password|secret|token$", re.IGNORECASE)  # in the name of an option of the server


def given(costs: dict[str, Any], gpus: int) -> Table:
    flat = _flat({key: value for key, value in costs.items() if key != "gpus"})
    units = {
        "gpu_hour_price": costs["currency"],
        "preparation_gpu_hours": "GPU hours",
        "adaptation_gpu_hours": "GPU hours",
        "success_within": "s",
        "limits.p95_seconds": "s",
        "limits.p95_time_to_first_token": "s",
    }
    rows: list[list[str | Cell]] = []
    for key, value in flat:
        unit = next((unit for name, unit in units.items() if key == name or key.startswith(f"{name}.")), "")
        rows.append([key, f"{value} {unit}".strip() if value != "not set" else value])
    rows.insert(2, ["gpus", str(gpus) if costs["gpus"] is not None else f"{gpus} (from the results)"])
    return Table(["key", "value"], rows, words=True)


def measured_with(decision: dict[str, Any]) -> Table:
    measured = decision["measured"]
    hardware = {key: value for key, value in (measured["hardware"] or {}).items() if key != "servers"}
    rows = [*_flat(measured["versions"] or {}), *_flat({"hardware": hardware})]
    rows += [(f"server of {arm}", _told(told)) for arm, told in (measured["hardware"] or {}).get("servers", {}).items()]
    rows += _flat({"config": _public(measured["config"])})
    rows += [("this page", f"osprey_jax {decision['osprey_jax']}, {decision['date']}")]
    return Table(["what", "value"], [list(row) for row in rows], words=True)


def _public(config: dict[str, Any]) -> dict[str, Any]:
    """The config without the addresses of servers and what opens them."""
    shown = dict(config)
    if config.get("servers"):
        shown["servers"] = f"{', '.join(config['servers'])} (addresses left out)"
    shown["sglang_arguments"], hide = [], False
    for argument in config.get("sglang_arguments") or []:
        name, given, _ = argument.partition("=")
        secret = name.startswith("-") and bool(_SECRET.search(name))
        shown["sglang_arguments"].append(
            "(left out)" if hide else f"{name}=(left out)" if secret and given else argument
        )
        hide = secret and not given
    return shown


def _flat(values: dict[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """Keys with dots, and values as text."""
    rows = []
    for key, value in values.items():
        if isinstance(value, dict) and value:
            rows += _flat(value, f"{prefix}{key}.")
        else:
            text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False).removesuffix(".0")
            rows.append((f"{prefix}{key}", "not set" if value is None else text))
    return rows


def _told(told: dict[str, Any]) -> str:
    return ", ".join(f"{key} {value}" for key, value in told.items())
