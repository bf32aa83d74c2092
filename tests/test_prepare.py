"""The command: it makes what `train` would, says what became of every record, and shows the mask."""

import json
import subprocess
import sys

import pytest
import yaml

from osprey_jax import prepare
from osprey_jax.data.rows import MANIFEST, Rows
from tests.conftest import GOLDEN

CASE = GOLDEN / "qwen3"


@pytest.fixture
def config(tmp_path):
    """A distillation's config; 12 records of which one is malformed and one unanswered."""
    lines = (CASE / "train.jsonl").read_text().splitlines()
    lines[3], lines[5] = "{", json.dumps({"id": "u", "conversations": json.loads(lines[5])["conversations"][:1]})
    (tmp_path / "train.jsonl").write_text("\n".join(lines) + "\n")
    values = {
        "stage": "distill",
        "run_dir": str(tmp_path / "run"),
        "target": str(CASE / "target"),
        "drafter": {"checkpoint": str(CASE / "expected" / "converted")},
        "data": {
            "train": [str(tmp_path / "train.jsonl")],
            "eval": [str(CASE / "train.jsonl")],
            "length": 400,
            "cache_dir": str(tmp_path / "prepared"),
        },
        "optimizer": {"learning_rate": 1e-3},
        "batch_size": 4,
        "steps": 6,
    }
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(values))
    return tmp_path / "config.yaml"


def prepared(tmp_path):
    return {path.parent for path in (tmp_path / "prepared").glob(f"*/{MANIFEST}")}


def test_report(config, tmp_path, run_command):
    """Counts by reason, and where the rows, the rejected records and the histogram are; no run is begun."""
    status, out, err = run_command(prepare.main, "--config", config)
    assert status == 0, err
    assert "malformed JSON" in out and "no assistant turn" in out
    directories = prepared(tmp_path)
    assert len(directories) == 2 and all(str(directory) in out for directory in directories)
    assert all((directory / "lengths.png").read_bytes().startswith(b"\x89PNG") for directory in directories)
    assert sorted(Rows(directory).report.used for directory in directories) == [10, 12]
    assert not (tmp_path / "run").exists()
    assert run_command(prepare.main, "--config", config)[:2] == (0, out), "the second time it only reads"


def test_show(config, run_command):
    """Records as text with the answers marked."""
    _, out, _ = run_command(prepare.main, "--config", config, "--show", 2)
    answers = [
        turn["content"] + "<|im_end|>"
        for line in (CASE / "train.jsonl").read_text().splitlines()
        for turn in json.loads(line)["conversations"]
        if turn["role"] == "assistant"
    ]
    marked = [part.split("⟧")[0] for part in out.split("⟦")[1:]]
    assert len(marked) >= 2 and all(text in answers for text in marked)
    assert out.split("⟧")[0].count("<|im_start|>assistant\n⟦") == 1


def test_overrides(config, tmp_path, run_command):
    """A key replaced on the command line is another preparation."""
    run_command(prepare.main, "--config", config, "data.eval=[]")
    run_command(prepare.main, "--config", config, "data.eval=[]", "data.packing=false")
    assert {len(Rows(directory)) for directory in prepared(tmp_path)} == {10, 6}


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("data.train=[nothing.jsonl]", "nothing.jsonl: matches no file"),
        ("data.length=1024", "data.length 1024 exceeds max_position_embeddings 512"),
        ("data.template_options={enable_thinkin: true}", "enable_thinkin"),
        ("data.pack=true", "unknown key data.pack"),
        ("data.eval=[nothing.jsonl]", "nothing.jsonl: matches no file"),
        ("data.eval=[README.md]", "README.md: data is read from"),
        ("data.template_options={enable_thinking: 2024-07-26}", "template_options.enable_thinking"),
        ("run_dir=/", "lies in run_dir"),
    ],
)
def test_bad_input(config, tmp_path, run_command, override, words):
    status, _, err = run_command(prepare.main, "--config", config, override)
    assert status == 2 and words in err and err.count("\n") == 1
    assert prepared(tmp_path) == set()


def test_conversations_are_not_text(config, tmp_path, run_command):
    """Found before anything is made."""
    (tmp_path / "a.txt").write_text("text")
    status, _, err = run_command(prepare.main, "--config", config, f"data.eval=[{tmp_path / 'a.txt'}]")
    assert status == 2 and "a.txt: conversations are read from" in err and prepared(tmp_path) == set()


def test_text_has_no_options_of_conversations(config, run_command):
    """What would do nothing is refused."""
    values = yaml.safe_load(config.read_text())
    values = {"stage": "pretrain", "model": {"checkpoint": str(CASE / "source")}} | {
        key: values[key] for key in ("run_dir", "data", "optimizer", "batch_size", "steps")
    }
    values["data"]["packing"] = True
    config.write_text(yaml.safe_dump(values))
    status, _, err = run_command(prepare.main, "--config", config)
    assert status == 2 and "unknown key data.packing" in err


def test_working_processes_do_without_jax(config):
    """They import the command's module again: it must be light, or each of them costs what training costs."""
    code = "import sys, osprey_jax.prepare, osprey_jax.train, osprey_jax.data.preparation; print('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "False\n"
