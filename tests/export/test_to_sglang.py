"""The exported config: keys that one SGLang or the other reads; and the command, which checks what it wrote."""

import shutil

import pytest
import yaml

from export import check, to_sglang
from export.to_sglang import sglang_config
from osprey_jax.config import TrainConfig, load_config
from osprey_jax.models.hf import load_drafter
from osprey_jax.models.hf_config import drafter_config
from osprey_jax.training import stages
from osprey_jax.training.loop import train
from osprey_jax.training.mesh import make_mesh
from tests.checkpoints import read, write
from tests.conftest import GOLDEN
from tests.export.exports import change_tensors

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


@pytest.fixture
def exported(tmp_path):
    """`exported(case, **changes)`: a golden drafter's config, changed (None takes a key away), as exported."""

    def export(case, **changes):
        raw = read(GOLDEN / case / "expected" / "converted" / "config.json") | changes
        raw = {key: value for key, value in raw.items() if value is not None}
        write(tmp_path / "config.json", raw)
        return sglang_config(raw, drafter_config(tmp_path))

    return export


@pytest.mark.parametrize(
    "keys",
    [
        {"rope_parameters": LLAMA3 | {"rope_theta": 5e5}},
        {"rope_parameters": None, "rope_theta": 5e5, "rope_scaling": LLAMA3},
    ],
    ids=["transformers 5", "transformers 4"],
)
def test_rope_keys_of_both_generations(exported, keys):
    """RoPE scaling survives whichever form the source wrote, and is written in both."""
    config = exported("llama", **keys)
    assert config["rope_parameters"] == LLAMA3 | {"rope_theta": 5e5}
    assert config["rope_theta"] == 5e5 and config["rope_scaling"] == LLAMA3


def test_plain_rope_has_no_scaling(exported):
    """Also where the source left theta to the architecture's default, as Llama 2 did."""
    config = exported("qwen3")
    assert config["rope_theta"] == 1e6 and config["rope_scaling"] is None
    config = exported("llama", rope_parameters=None)
    assert config["rope_parameters"] == {"rope_type": "default", "rope_theta": 1e4} and config["rope_theta"] == 1e4


def test_head_is_untied_whatever_the_source_said(exported):
    """SGLang would tie the head to the embedding, and drop the trained one."""
    assert exported("qwen3", tie_word_embeddings=True)["tie_word_embeddings"] is False


# ---- the whole command, on a real run


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """`runs(case, **changes) -> Path`: the directory of a run of two steps, its target in `target` beside it."""

    def make(case, **changes):
        folder = tmp_path_factory.mktemp(case)
        shutil.copytree(GOLDEN / case / "target", folder / "target")
        config = {
            "stage": "distill",
            "run_dir": str(folder / "run"),
            "target": str(folder / "target"),
            "drafter": {"checkpoint": str(GOLDEN / case / "expected" / "converted")},
            "data": {
                "train": [str(GOLDEN / case / "train.jsonl")],
                "length": 128,
                "cache_dir": str(folder / "rows"),
                "processes": 1,
            },
            "optimizer": {"learning_rate": 1e-2},
            "ttt": {"length": 2},
            "batch_size": 4,
            "steps": 2,
        }
        (folder / "run.yaml").write_text(yaml.safe_dump(config | changes))
        config = load_config(folder / "run.yaml", [], TrainConfig)
        mesh = make_mesh(config.mesh, rows=config.batch_size)
        train(config, stages.set_up(config, mesh), mesh)
        return folder / "run"

    return make


@pytest.fixture(scope="module")
def run_dir(runs):
    return runs("llama")


def test_exports_are_checked(run_dir, tmp_path, run_command):
    """The command says how the files compare; they hold what `export.check` needs, which then finds the same."""
    status, out, err = run_command(to_sglang.main, "--run", run_dir, "--out", tmp_path / "x")
    assert (status, err) == (0, "") and "checking on 8 records of data.train, since data.eval names none" in out
    table = out[out.index("step ") : out.index("accepted length")]
    assert table.count("100.0%") == 5 and read(tmp_path / "x" / "config.json")["osprey_layout"] == 1
    target = run_dir.parent / "target"
    status, out, err = run_command(check.main, "--export", tmp_path / "x", "--target", target)
    assert (status, err) == (0, "") and table in out
    same = load_drafter(tmp_path / "x")
    assert same.config.tap_layers == (1, 3, 5)  # and the file beside the weights disturbs no reader


@pytest.mark.parametrize(
    "drafter",
    [{"scratch": {"num_layers": 1}}, {"scratch": {"num_layers": 2}, "draft_vocab_size": 100}],
    ids=["one layer", "trimmed"],
)
def test_baselines_pass(runs, tmp_path, run_command, drafter):
    """EAGLE-3 from scratch is served with the target's embedding, and may have a small vocabulary."""
    run_dir = runs("qwen3", drafter=drafter)
    status, out, err = run_command(to_sglang.main, "--run", run_dir, "--out", tmp_path / "x")
    assert (status, err) == (0, "") and out[out.index("step ") :].count("100.0%") == 5


def test_a_fault_leaves_no_export(run_dir, tmp_path, run_command, monkeypatch):
    """What serving would get wrong does not appear under the name that was asked for."""
    config = to_sglang.sglang_config
    tied = lambda *arguments: config(*arguments) | {"tie_word_embeddings": True}
    monkeypatch.setattr(to_sglang, "sglang_config", tied)
    status, _, err = run_command(to_sglang.main, "--run", run_dir, "--out", tmp_path / "x")
    assert status == 2 and f"{tmp_path / 'x'}: head tied" in err and not list(tmp_path.iterdir())


def test_a_fault_of_the_config_itself(run_dir, tmp_path, run_command, monkeypatch):
    """Also blocks that the first run of the target did not keep are looked at."""
    config = to_sglang.sglang_config
    ids = {"eagle_aux_hidden_state_layer_ids": [1, 3, 7], "use_aux_hidden_state": True}
    monkeypatch.setattr(to_sglang, "sglang_config", lambda *arguments: config(*arguments) | {"eagle_config": ids})
    status, _, err = run_command(to_sglang.main, "--run", run_dir, "--out", tmp_path / "x")
    assert status == 2 and "tap ids wrong: " in err and "(so repaired, " in err and not list(tmp_path.iterdir())


def test_skipped_check(run_dir, tmp_path, run_command, monkeypatch):
    """Without the target there is nothing to replay on: said, and not kept from who wants the files."""
    (run_dir.parent / "target").rename(run_dir.parent / "moved")
    try:
        status, _, err = run_command(to_sglang.main, "--run", run_dir, "--out", tmp_path / "x")
        assert status == 2 and "target: no such directory" in err and "--target, or --skip-check" in err
        status, _, err = run_command(to_sglang.main, "--run", run_dir, "--out", tmp_path / "x", "--skip-check")
        assert status == 0 and "warning: --skip-check" in err and not (tmp_path / "x" / "check.npz").exists()
        moved = ("--run", run_dir, "--out", tmp_path / "y", "--target", run_dir.parent / "moved")
        assert run_command(to_sglang.main, *moved)[0] == 0 and (tmp_path / "y" / "check.npz").exists()
        status, _, err = run_command(to_sglang.main, *moved[:-2], "--skip-check", *moved[-2:])
        assert status == 2 and "which --skip-check leaves out" in err
    finally:
        (run_dir.parent / "moved").rename(run_dir.parent / "target")


def test_another_target(run_dir, tmp_path, run_command):
    """A target that is not the run's passes, since both sides read its features: hence a word."""
    shutil.copytree(run_dir.parent / "target", tmp_path / "other")
    change_tensors(tmp_path / "other", lambda tensors: tensors.update({"lm_head.weight": -tensors["lm_head.weight"]}))
    command = ("--run", run_dir, "--out", tmp_path / "x", "--target", tmp_path / "other")
    status, _, err = run_command(to_sglang.main, *command)
    assert status == 0 and err == f"warning: {tmp_path / 'other'}: not the files that the run was trained against\n"


def test_records_given(run_dir, tmp_path, run_command):
    """Where the run's data has gone, any conversations do."""
    records = tmp_path / "held-out.jsonl"
    records.write_text("".join((GOLDEN / "llama" / "train.jsonl").read_text().splitlines(keepends=True)[:3]))
    command = ("--run", run_dir, "--out", tmp_path / "x", "--records", records)
    status, out, _ = run_command(to_sglang.main, *command)
    assert status == 0 and f"checking on 3 records of {records}" in out
    records.unlink()
    status, _, err = run_command(to_sglang.main, *command[:3], tmp_path / "y", *command[4:])
    assert status == 2 and "give --records a file of conversations, or --skip-check" in err
