"""Configs: what is accepted, and one line that names what is not."""

import pytest
import yaml

from osprey_jax.command import UserError
from osprey_jax.config import DistillConfig, PretrainConfig, TrainConfig, load_config

DISTILL = {
    "stage": "distill",
    "run_dir": "runs/x",
    "target": "models/target",
    "drafter": {"checkpoint": "models/drafter"},
    "data": {"train": ["a.jsonl"], "length": 128},
    "optimizer": {"learning_rate": 1e-4},
    "batch_size": 8,
    "epochs": 3,
}
PRETRAIN = {
    "stage": "pretrain",
    "run_dir": "runs/y",
    "model": {"checkpoint": "models/backbone"},
    "data": {"train": ["a.txt"], "length": 128},
    "optimizer": {"learning_rate": 1e-4},
    "batch_size": 8,
    "steps": 100,
}


@pytest.fixture
def load(tmp_path):
    """`load(values or YAML text, *overrides)`: a config read from a file."""

    def call(values, *overrides):
        path = tmp_path / "config.yaml"
        path.write_text(values if isinstance(values, str) else yaml.safe_dump(values))
        return load_config(path, list(overrides), TrainConfig)

    return call


def test_stage_chooses_the_class(load):
    assert isinstance(load(DISTILL), DistillConfig) and isinstance(load(PRETRAIN), PretrainConfig)


def test_overrides(load):
    """Dots go down and make groups that are not there; values are YAML."""
    config = load(DISTILL, "optimizer.learning_rate=3e-4", "ttt.length=3", "tap_layers=[1, 2, 3]", "data.eval=[b]")
    assert config.optimizer.learning_rate == 3e-4 and config.ttt.length == 3
    assert config.tap_layers == (1, 2, 3) and config.data.eval == ["b"]


def test_override_replaces_one_of_two_starts(load):
    """`null` takes a key away, so that another start can be given."""
    config = load(DISTILL, "drafter.checkpoint=null", "drafter.scratch.num_layers=2")
    assert config.drafter.scratch.num_layers == 2


@pytest.mark.parametrize(
    ("base", "override", "message"),
    [
        (DISTILL, "optimzer.learning_rate=1", "unknown key optimzer"),
        (DISTILL, "optimizer.lr=1", r"unknown key optimizer\.lr"),
        (DISTILL, "model.checkpoint=x", "unknown key model"),
        (PRETRAIN, "ttt.length=3", "unknown key ttt"),
        (DISTILL, "steps=10", "give either epochs or steps"),
        (DISTILL, "epochs=null", "give either epochs or steps"),
        (DISTILL, "accumulation=3", "accumulation 3 does not divide batch_size 8"),
        (DISTILL, "eval_every=5", r"eval_every is set, but data\.eval names no file"),
        (DISTILL, "drafter.scratch.num_layers=1", "drafter: give either checkpoint or scratch"),
        (PRETRAIN, "model.config=c.json", "model: give either checkpoint, or config and tokenizer"),
        (PRETRAIN, "model={config: c.json}", "model: give either checkpoint, or config and tokenizer"),
        (DISTILL, "stage=finetune", "stage must be pretrain or distill"),
        (DISTILL, "target=null", "target: "),
        (DISTILL, "batch_size=0", "batch_size: .*greater than or equal to 1, not 0"),
        (DISTILL, "optimizer.learning_rate=fast", r"optimizer\.learning_rate: .*valid number.*not 'fast'"),
        (DISTILL, "ttt.supervision=late", r"ttt\.supervision: .*'released' or 'exact', not 'late'"),
        (DISTILL, "batch_size=true", "batch_size: .*valid integer, not True"),
        (DISTILL, "optimizer.learning_rate=.inf", "finite number"),
        (DISTILL, "optimizer.beta1=1", r"optimizer\.beta1: .*less than 1"),
        (DISTILL, "seed=4294967296", "seed: .*less than 4294967296"),
        (PRETRAIN, "data.length=1", r"data\.length: .*greater than or equal to 2"),
        (DISTILL, "batch_size", "'batch_size' is not key=value"),
        (DISTILL, "target.path=x", "target is a value, not a group of keys"),
        (DISTILL, "batch_size=[", "the value is not valid YAML"),
    ],
)
def test_bad_keys_and_values(load, base, override, message):
    with pytest.raises(UserError, match=message):
        load(base, override)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("stage: [", "not valid YAML"),
        ("- a\n- b\n", "expected keys and values"),
        ("", "expected keys and values"),
        ("stage: distill\nstage: pretrain\n", "'stage' is given twice"),
        ("run_dir: 2024-13-45\n", "not valid YAML"),
        ("stage: !!map foo\n", "not valid YAML"),
        ("stage: !!python/object/apply:os.system ['true']\n", "not valid YAML"),
    ],
)
def test_bad_files(load, text, message):
    """Also a key given twice, of which YAML would keep the last, and anything that would run code."""
    with pytest.raises(UserError, match=message):
        load(text)


def test_missing_file(tmp_path):
    with pytest.raises(UserError, match=r"nothing\.yaml: cannot be read"):
        load_config(tmp_path / "nothing.yaml", [], TrainConfig)
