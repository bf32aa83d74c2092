"""`results.json` read again: what a decision reckons with must be there, and be numbers."""

from pathlib import Path
from typing import Annotated, Any

import pydantic

from osprey_jax.command import UserError
from osprey_jax.files import read_json

_Count = Annotated[int, pydantic.Field(ge=0)]
_Measure = Annotated[float, pydantic.Field(ge=0)]


class _Part(pydantic.BaseModel):
    """Looked at alone: there may be more, and nothing is changed."""

    model_config = pydantic.ConfigDict(extra="ignore", strict=True, allow_inf_nan=False)


class _Difference(_Part):
    token: _Count
    off: str
    this: str


class _Request(_Part):
    id: str
    turn: _Count
    completion_tokens: _Count
    verifications: _Count | None
    accepted_length: _Measure | None
    finish_reason: str
    seconds: _Measure | None
    time_to_first_token: _Measure | None
    attempts: _Count
    lost_seconds: _Measure
    matches_off: bool | None
    first_difference: _Difference | None


class _Failure(_Part):
    id: str
    turn: _Count
    lost_seconds: _Measure
    reason: str


class _Result(_Part):
    arm: str
    prompts: str
    concurrency: _Count | None
    busy_seconds: _Measure | None
    requests: list[_Request]
    failures: list[_Failure]


class _Config(_Part):
    seed: _Count


class _Hardware(_Part):
    device: str | None = None
    gpus: _Count | None = None
    servers: dict[str, dict[str, Any]] = {}


class _Results(_Part):
    config: _Config
    versions: dict[str, Any]
    hardware: _Hardware
    results: list[_Result]

    @pydantic.field_validator("results")
    @classmethod
    def _once(cls, results: list[_Result]) -> list[_Result]:
        names = [(result.arm, result.prompts, result.concurrency) for result in results]
        if len(set(names)) < len(names):
            raise ValueError("an arm stands there twice with one prompt set and level")
        return results


def read_results(path: Path) -> dict[str, Any]:
    """What `evaluate` wrote, as it is.

    Raises:
      UserError: no such file, or one of SGLang's that lacks something or was changed to what cannot be.
    """
    results = read_json(path)
    if results.get("engine") == "sglang":  # another is no ground for a decision, and said to be none
        try:
            _Results.model_validate(results)
        except pydantic.ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"]))
            raise UserError(
                f"{path}: {where}: {first['msg']}; run the same command without --decide, which writes it anew"
            ) from error
    return results
