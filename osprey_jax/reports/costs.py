"""The user's side of a decision: the keys of `evaluate --decide COSTS.yaml`."""

from collections.abc import Sequence
from typing import Annotated

import pydantic

from osprey_jax.command import UserError
from osprey_jax.config import Positive, Seconds, Section

Amount = Annotated[float, pydantic.Field(ge=0)]
Share = Annotated[float, pydantic.Field(ge=0, le=1)]  # 0.05 is 5%


class Limits(Section):
    """What a drafter must keep to. One that is not given is not asked for."""

    p95_seconds: Seconds | None = None  # in which 95% of the answers must be complete, retries included
    p95_time_to_first_token: Seconds | None = None  # in which 95% of the answers must begin, retries included
    min_share_equal_to_off: Share | None = None  # of the answers that must be those of speculation off, token for token
    max_failure_share: Share | None = None  # of the requests that may be without success
    max_slice_regression: Amount | None = None  # by which a prompt set's cost per success may exceed that of off


class DecisionConfig(Section):
    """What GPUs cost, what making the drafters took, the traffic to come, and the limits to keep to."""

    currency: Annotated[str, pydantic.Field(min_length=1)] = "USD"
    gpu_hour_price: Annotated[float, pydantic.Field(gt=0)]  # of one GPU for an hour, in that currency
    gpus: Annotated[int, pydantic.Field(ge=1, le=100_000, strict=True)] | None = (
        None  # that served one arm; None: as many as its server said
    )
    preparation_gpu_hours: Amount | dict[str, Amount]  # once: the backbone; one number for all drafters, or by drafter
    adaptation_gpu_hours: (
        Amount | dict[str, Amount]
    )  # once: data, conversion and distillation for this target; likewise
    idle_share: Annotated[float, pydantic.Field(ge=0, lt=1)]  # of the GPU hours paid for that serve no request
    requests_per_month: Annotated[float, pydantic.Field(gt=0)]  # successful ones
    months: Annotated[float, pydantic.Field(gt=0)]  # within which a drafter must pay for itself
    concurrency: Positive  # the level decided at: requests at one time, one of those measured
    mix: dict[str, Share] | None = None  # prompt set -> its share of the requests to come; None: as measured
    success_within: Seconds | None = None  # an answer that took longer, retries included, is no success; None: any is
    examples: Annotated[int, pydantic.Field(ge=0, strict=True)] = 3  # texts quoted on the page, of each drafter
    limits: Limits = Limits()

    @pydantic.field_validator("mix")
    @classmethod
    def _whole(cls, mix: dict[str, float] | None) -> dict[str, float] | None:
        if mix is not None and abs(sum(mix.values()) - 1) > 1e-6:
            raise ValueError(f"the shares add up to {sum(mix.values()):g}, not to 1")
        return mix


def one_off_hours(costs: DecisionConfig, drafters: Sequence[str]) -> dict[str, float]:
    """GPU hours that making each drafter took, preparation and adaptation.

    Raises:
      UserError: hours by drafter that lack one, or name another.
    """
    hours = dict.fromkeys(drafters, 0.0)
    for key in ("preparation_gpu_hours", "adaptation_gpu_hours"):
        given = getattr(costs, key)
        by_drafter = given if isinstance(given, dict) else dict.fromkeys(drafters, given)
        check_names(key, by_drafter, drafters)
        for name in drafters:
            hours[name] += by_drafter[name]
    return hours


def check_names(key: str, given: Sequence[str], measured: Sequence[str]) -> None:
    """Raises `UserError` where `given` are not the names measured, all of them."""
    if unknown := sorted(set(given) - set(measured)):
        raise UserError(f"{key}: {', '.join(unknown)} was not measured; there are {', '.join(measured)}")
    if missing := sorted(set(measured) - set(given)):
        raise UserError(f"{key}: lacks {', '.join(missing)}")
