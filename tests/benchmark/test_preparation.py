"""The benchmark compares like with like: the same texts, the same cores."""

import json
import os
import re

import yaml

from osprey_jax.benchmark import preparation
from osprey_jax.benchmark.__main__ import main
from osprey_jax.benchmark.timing import Seconds
from osprey_jax.data.preparation import prepare
from osprey_jax.data.recipes import ConversationRecipe, TextRecipe
from tests.conftest import GOLDEN

CASE = GOLDEN / "qwen3"
CONVERSATIONS = ConversationRecipe(CASE / "target", 512, {}, False, True)


def test_table(tmp_path, monkeypatch, run_command):
    """A row for each number of processes with its two ratios; nothing is left in the cache."""
    monkeypatch.setattr(preparation, "cores", lambda: sorted(os.sched_getaffinity(0))[:1])
    config = {
        "stage": "distill",
        "run_dir": str(tmp_path / "run"),
        "target": str(CASE / "target"),
        "drafter": {"scratch": {"num_layers": 1}},
        "data": {"train": [str(CASE / "train.jsonl")], "length": 512, "cache_dir": str(tmp_path / "prepared")},
        "optimizer": {"learning_rate": 1e-3},
        "batch_size": 1,
        "steps": 1,
    }
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    arguments = ["preparation", "--config", tmp_path / "config.yaml", "--megabytes", "0.1", "--repeats", "1"]
    status, out, err = run_command(main, *arguments)
    assert status == 0, err
    header, _, row = out.splitlines()
    assert re.split(r"\s{2,}", header) == list(preparation.HEADER)
    processes, by_clock, by_cpu = map(float, row.split())
    assert processes == 1 and 0 < by_clock < 2 and 0 < by_cpu < 2
    assert os.listdir(tmp_path) == ["config.yaml"]


def test_all_powers_of_two_and_all_cores(tmp_path, monkeypatch):
    """The median ratio of each; the sample grows with the processes, and both sides get the same cores."""
    monkeypatch.setattr(preparation, "cores", lambda: list(range(10, 16)))
    walls, calls = iter([1, 4, 1, 3, 1, 2] * 4), []

    def apart(to, threads, function, *arguments):
        calls.append((to, threads, function.__name__, arguments[1].stat().st_size // 5000, *arguments[2:]))
        seconds = Seconds(next(walls), 1.0)
        return (600, seconds) if function is preparation._encode else seconds

    monkeypatch.setattr(preparation, "_apart", apart)
    rows = preparation.measure([str(CASE / "train.jsonl")], CONVERSATIONS, 5000, repeats=3)
    assert rows == [(n, 3.0, 1.0) for n in (1, 2, 4, 6)]
    assert calls[-2:] == [(list(range(10, 16)), 1, "_prepare", 6, 6), (list(range(10, 16)), 6, "_encode", 6)]
    assert [call[0] for call in calls[6:8]] == [[10, 11]] * 2


def test_the_same_texts_are_tokenized(tmp_path):
    """As many tokens as the preparation has: without the records that it drops, or their rendering."""
    lines = (CASE / "train.jsonl").read_bytes().splitlines()
    lines[3], unanswered = b"{", json.loads(lines[5])
    lines[5] = json.dumps(unanswered | {"conversations": unanswered["conversations"][:1]}).encode()
    sample = tmp_path / "sample.jsonl"
    sample.write_bytes(b"\n".join(lines))
    tokens, _ = preparation._encode(CONVERSATIONS, sample)
    report = prepare([str(sample)], CONVERSATIONS, tmp_path / "prepared", 1).report
    assert (tokens, report.used) == (report.tokens, len(lines) - 2)


def test_the_same_documents_are_tokenized(tmp_path):
    """Text of other files becomes JSONL, and every document its tokens without the EOS."""
    (tmp_path / "a.txt").write_text("It is the text of a free program.\n" * 30)
    (tmp_path / "b.jsonl").write_text('{"text": "and"}\n\n{"text": "you can"}\n')
    sample, recipe = tmp_path / "sample.jsonl", TextRecipe(CASE / "source", 64)
    preparation._write_sample([tmp_path / "a.txt", tmp_path / "b.jsonl"], sample, 1090)
    assert [json.loads(line)["text"] for line in sample.read_text().split("\n") if line][-2:] == ["and", "you can"]
    tokens, _ = preparation._encode(recipe, sample)
    report = prepare([str(sample)], recipe, tmp_path / "prepared", 1).report
    assert (tokens, report.used) == (report.tokens - report.used, 3)


def test_data_that_is_short_is_repeated(tmp_path):
    data, sample = tmp_path / "data.jsonl", tmp_path / "sample.jsonl"
    data.write_text('{"text": "a"}\n{"text": "b"}')
    preparation._write_sample([data], sample, 60)
    assert sample.read_text() == '{"text": "a"}\n{"text": "b"}\n' * 2 + '{"text": "a"}\n'


def _environment() -> tuple:
    return os.environ["RAYON_NUM_THREADS"], os.environ["TOKENIZERS_PARALLELISM"], sorted(os.sched_getaffinity(0))


def test_a_measurement_has_its_cores_and_threads():
    core = min(os.sched_getaffinity(0))
    assert preparation._apart([core], 3, _environment) == ("3", "true", [core])
    assert "RAYON_NUM_THREADS" not in os.environ
