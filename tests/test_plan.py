"""The command: what it refuses in one line, and what it tells JAX. Compiling is tested in `tests/planning`."""

import os

import pytest
import yaml

from osprey_jax import plan
from osprey_jax.benchmark import shapes
from osprey_jax.planning import compiled
from tests.planning.cases import SMALL, TARGET


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    """What the command changes is put back."""
    for name in ("JAX_PLATFORMS", "XLA_FLAGS", "TF_CPP_MIN_LOG_LEVEL"):
        monkeypatch.setenv(name, os.environ.get(name, ""))


@pytest.fixture
def config_file(tmp_path):
    config = shapes.distill_config(tmp_path, TARGET, shapes.converted(SMALL, TARGET), rows=2, length=32)
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(yaml.safe_load(config.model_dump_json(exclude_none=True))))
    return path


@pytest.fixture
def no_plugin(monkeypatch):
    monkeypatch.setattr(compiled, "_version", lambda package: "0.1" if package == "jaxlib" else None)


def test_without_the_plugin_it_says_how_to_install_it(run_command, config_file, no_plugin):
    """The command needs an extra that the default installation has not."""
    status, _, error = run_command(plan.main, "--config", config_file, "--devices", "2xh100")
    assert status == 2
    assert "pip install '.[plan]'" in error and error.count("\n") == 1


@pytest.mark.parametrize(
    "arguments, names",
    [
        (["--devices", "2xa100"], "a100"),
        ([], "--devices"),
        (["--devices", "2xh100", "--supervised", "75"], "75"),
        (["--devices", "2xh100", "--supervised", "nan"], "nan"),
        (["--devices", "2xh100", "--json", "/nowhere/plan.json"], "/nowhere"),
        (["--devices", "2xh100", "batchsize=4"], "batchsize"),
    ],
)
def test_bad_arguments_are_one_line(run_command, config_file, arguments, names):
    """What is wrong is said before anything is compiled."""
    status, _, error = run_command(plan.main, "--config", config_file, *arguments)
    assert status == 2
    assert names in error and error.count("\n") == 1


def test_overrides_stand_anywhere(run_command, config_file, no_plugin):
    """Before, between and after options."""
    arguments = ["seed=1", "--config", config_file, "batch_size=4", "--devices", "2xh100", "log_every=1"]
    assert "plugin" in run_command(plan.main, *arguments)[2]


def test_flags_of_the_user_stay(monkeypatch):
    """Only what is not set is set."""
    monkeypatch.setenv("XLA_FLAGS", "--xla_something=1")
    plan._before_jax()
    assert os.environ["XLA_FLAGS"] == "--xla_something=1 --xla_gpu_enable_triton_gemm=false"
    assert os.environ["JAX_PLATFORMS"] == "cpu"
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_enable_triton_gemm=true")
    plan._before_jax()
    assert os.environ["XLA_FLAGS"] == "--xla_gpu_enable_triton_gemm=true"
