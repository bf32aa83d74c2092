import pytest

from osprey_jax.command import UserError
from osprey_jax.config import load_config
from osprey_jax.reports.costs import DecisionConfig, one_off_hours

GIVEN = """
gpu_hour_price: 2.5
preparation_gpu_hours: 100
adaptation_gpu_hours: {osprey: 48, eagle: 20.5}
idle_share: 0.4
requests_per_month: 1000000
months: 12
concurrency: 8
"""


def load(tmp_path, *overrides, text=GIVEN):
    (tmp_path / "costs.yaml").write_text(text)
    return load_config(tmp_path / "costs.yaml", list(overrides), DecisionConfig)


def test_hours_for_all_or_by_drafter(tmp_path):
    """One number is of each drafter; numbers by name are of those."""
    assert one_off_hours(load(tmp_path), ["osprey", "eagle"]) == {"osprey": 148, "eagle": 120.5}


def test_limits_are_optional(tmp_path):
    """What is not given is not asked for, and costs have no default that could pass unseen."""
    assert set(load(tmp_path).limits.model_dump().values()) == {None}
    for line in GIVEN.strip().splitlines():
        with pytest.raises(UserError, match=f"missing key {line.partition(':')[0]}"):
            load(tmp_path, text=GIVEN.replace(line, ""))


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("mix={code: 0.5, prose: 0.4}", "mix: the shares add up to 0.9, not to 1"),
        ("mix={}", "mix: the shares add up to 0, not to 1"),
        ("mix={code: 1.5, prose: -0.5}", "mix.code"),
        ("idle_share=1", "idle_share"),
        ("gpu_hour_price=0", "gpu_hour_price"),
        ("months=0", "months"),
        ("adaptation_gpu_hours=-1", "adaptation_gpu_hours"),
        ("limits.max_failure_share=1.5", "limits.max_failure_share"),
        ("limits.p99_seconds=1", "unknown key limits.p99_seconds"),
        ("success_within=0", "success_within"),
    ],
)
def test_refused(tmp_path, override, words):
    """A number that means nothing is one line with its key, before anything is computed."""
    with pytest.raises(UserError, match=words):
        load(tmp_path, override)


@pytest.mark.parametrize(
    ("hours", "words"),
    [
        ("{osprey: 1}", "adaptation_gpu_hours: lacks eagle"),
        ("{osprey: 1, eagle: 2, hawk: 3}", "adaptation_gpu_hours: hawk was not measured; there are osprey, eagle"),
    ],
)
def test_hours_name_the_drafters(tmp_path, hours, words):
    """A drafter that is forgotten would have cost nothing."""
    with pytest.raises(UserError, match=words):
        one_off_hours(load(tmp_path, f"adaptation_gpu_hours={hours}"), ["osprey", "eagle"])
