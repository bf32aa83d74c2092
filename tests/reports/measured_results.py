"""Results of a measurement, made up: what the tests of decisions start from."""

from typing import Any

from osprey_jax.reports.costs import DecisionConfig


def request(name: str, seconds: float, **fields: Any) -> dict[str, Any]:
    return {
        "id": name,
        "turn": 0,
        "prompt_tokens": 5,
        "completion_tokens": 100,
        "verifications": None,
        "accepted_length": None,
        "histogram": None,
        "finish_reason": "stop",
        "seconds": seconds,
        "time_to_first_token": 0.1,
        "milliseconds_per_token": 10 * seconds,
        "attempts": 1,
        "lost_seconds": 0.0,
        "matches_off": True,
        "first_difference": None,
        "text": "answer",
    } | fields


def failure(name: str, lost_seconds: float, **fields: Any) -> dict[str, Any]:
    return {"id": name, "turn": 0, "attempts": 3, "lost_seconds": lost_seconds, "reason": "HTTP 500"} | fields


def asked(arm: str, seconds: list[float], prompts: str = "code", level: int = 1, **fields: Any) -> dict[str, Any]:
    """One arm on one set, a request for each of `seconds`, all verified 25 times but for off's."""
    verified = {} if arm == "off" else {"verifications": 25, "accepted_length": 4.0}
    requests = [request(f"{prompts}{i}", value, **verified) for i, value in enumerate(seconds)]
    names = {"arm": arm, "prompts": prompts, "concurrency": level}
    return names | {"busy_seconds": sum(seconds) / level, "failures": [], "requests": requests} | fields


def busy(result: dict[str, Any]) -> dict[str, Any]:
    """`result` with the busy time of its requests and failures one after another."""
    ran = sum(r["seconds"] + r["lost_seconds"] for r in result["requests"])
    return result | {"busy_seconds": ran + sum(f["lost_seconds"] for f in result["failures"])}


def measurement(*results: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """A whole `results.json`, of one GPU."""
    config = {"engine": "sglang", "target": "models/target", "seed": 0, "servers": {}, "sglang_arguments": []}
    return {
        "date": "2026-01-02T03:04:05+00:00",
        "engine": "sglang",
        "config": config,
        "versions": {"osprey_jax": "0.1.0", "sglang": "0.5.23"},
        "hardware": {"device": "cuda", "gpus": 1, "gpu": "NVIDIA H200", "servers": {}},
        "results": list(results),
    } | fields


def costs(**fields: Any) -> DecisionConfig:
    """A busy second of one GPU costs 0.001; 36 are spent once."""
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


def only(decision: dict[str, Any]) -> dict[str, Any]:
    [drafter] = decision["drafters"]
    return drafter


def check(drafter: dict[str, Any], key: str) -> dict[str, Any]:
    return next(row for row in drafter["checks"] if row["limit_key"] == key)


def with_requests(result: dict[str, Any], **changes: list) -> dict[str, Any]:
    """`result` with other values in its requests, by position."""
    requests = [dict(r) for r in result["requests"]]
    for key, values in changes.items():
        for one, value in zip(requests, values, strict=True):
            one[key] = value
    return busy(result | {"requests": requests})


OFF = asked("off", [8.0, 12.0, 10.0, 10.0])
HALF = asked("osprey", [4.0, 6.0, 5.0, 5.0])
