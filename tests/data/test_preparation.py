"""Preparation: the same rows whatever happens on the way, and no rows where something is wrong."""

import collections
import dataclasses
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from osprey_jax.command import UserError
from osprey_jax.data import preparation
from osprey_jax.data.preparation import find_prepared, prepare
from osprey_jax.data.recipes import TextRecipe
from osprey_jax.data.rows import LENGTH_EDGES, MANIFEST, REJECTED, Rows
from tests.conftest import GOLDEN
from tests.data.preparing import recipe

SOURCE = (GOLDEN / "qwen3/train.jsonl").read_bytes().splitlines(keepends=True)


def write(path: Path, records: int) -> Path:
    """A file of so many records of several lengths, each 20th of them malformed."""
    lines = []
    for i in range(records):
        record = json.loads(SOURCE[i % len(SOURCE)]) | {"id": f"r{i}"}
        lines.append(b"{\n" if i % 20 == 7 else json.dumps(record).encode() + b"\n")
    path.write_bytes(b"".join(lines))
    return path


@pytest.fixture
def small_blocks(monkeypatch):
    """A few records a block, four blocks a shard."""
    monkeypatch.setattr(preparation, "BLOCK_BYTES", 4000)
    monkeypatch.setattr(preparation, "BLOCKS_A_SHARD", 4)


def content(rows: Rows) -> dict[str, list]:
    """{record id: its segment's tokens and mask}; a record that is there twice fails."""
    found = {}
    for i in range(len(rows)):
        row = rows[i]
        for segment, name in enumerate(rows.records(i), start=1):
            inside = row["segment_ids"] == segment
            assert name not in found
            found[name] = [row["token_ids"][inside].tolist(), row["loss_mask"][inside].tolist()]
    return found


def rejected(rows: Rows) -> list[dict]:
    return [json.loads(line) for line in (rows.directory / REJECTED).read_text(encoding="utf-8").splitlines()]


def test_report(tmp_path, small_blocks):
    """Its numbers are those of the rows and of the file; what is rejected is listed with its line."""
    rows = prepare([str(write(tmp_path / "a.jsonl", 60))], recipe(), tmp_path / "cache", 1)
    report, arrays = rows.report, [rows[i] for i in range(len(rows))]
    assert (report.read, report.used, report.cut, report.dropped) == (60, 57, 0, {"malformed JSON": 3})
    assert (report.rows, report.length) == (len(rows), 400)
    assert report.tokens == sum(int((row["segment_ids"] > 0).sum()) for row in arrays)
    assert report.supervised == sum(int(row["loss_mask"].sum()) for row in arrays) == rows.supervised_count_V.sum()
    assert report.fill == report.tokens / (len(rows) * 400)
    counted = collections.Counter(token for row in arrays for token in row["token_ids"][row["loss_mask"] == 1].tolist())
    assert {i: n for i, n in enumerate(rows.supervised_count_V.tolist()) if n} == counted
    lengths = [len(tokens) for tokens, _ in content(rows).values()]
    assert report.lengths == np.histogram(lengths, [*LENGTH_EDGES, 2**62])[0].tolist()
    assert [line["where"] for line in rejected(rows)] == [f"{tmp_path / 'a.jsonl'}:{n}" for n in (8, 28, 48)]


def test_cut_records_are_listed(tmp_path):
    """Beside those that are dropped, with how much was lost."""
    rows = prepare([str(write(tmp_path / "a.jsonl", 12))], recipe(length=150), tmp_path / "cache", 1)
    reasons = [line["reason"] for line in rejected(rows)]
    assert rows.report.cut == sum(reason.startswith("cut at 150 of ") for reason in reasons) > 0
    assert len(reasons) == rows.report.cut + sum(rows.report.dropped.values())


def test_processes_change_nothing(tmp_path, small_blocks):
    """One, two or three processes: the same rows in the same order, the same report, the same rejections."""
    pattern = [str(write(tmp_path / "a.jsonl", 100))]
    one, *others = (prepare(pattern, recipe(), tmp_path / str(n), n) for n in (1, 2, 3))
    assert len(list(one.directory.glob("shard-*"))) > 1, "several shards"
    for other in others:
        assert other.fingerprint == one.fingerprint and other.report == one.report
        assert rejected(other) == rejected(one)
        for i in range(len(one)):
            assert other.records(i) == one.records(i)
            for name, array in one[i].items():
                np.testing.assert_array_equal(other[i][name], array)


def test_one_block_is_all_blocks(tmp_path, monkeypatch):
    """Where a block ends changes which records share a row, and nothing of a record."""
    pattern = [str(write(tmp_path / "a.jsonl", 40))]
    whole = prepare(pattern, recipe(), tmp_path / "whole", 1)
    monkeypatch.setattr(preparation, "BLOCK_BYTES", 1)
    single = prepare(pattern, recipe(), tmp_path / "single", 1)
    assert content(whole) == content(single) and len(whole) < len(single) == whole.report.used


def test_done_once(tmp_path, monkeypatch):
    """The second time nothing is made, also where the file lies elsewhere under another name."""
    path = write(tmp_path / "a.jsonl", 30)
    rows = prepare([str(path)], recipe(), tmp_path / "cache", 1)
    monkeypatch.setattr(preparation, "_make", None)
    (tmp_path / "b").mkdir()
    moved = shutil.move(path, tmp_path / "b/other.jsonl")
    assert prepare([str(moved)], recipe(), tmp_path / "cache", 1).directory == rows.directory


@pytest.mark.parametrize(
    "change",
    ["data", "order", "kind", "length", "options", "last turn", "packing", "tokenizer", "template", "model", "block"],
)
def test_any_edit_makes_a_new_key(tmp_path, change, monkeypatch):
    """Content of data and tokenizer, template, length and options, each alone."""
    tokenizer = tmp_path / "tokenizer"
    shutil.copytree(GOLDEN / "qwen3/target", tokenizer, ignore=shutil.ignore_patterns("*.safetensors"))
    before = dataclasses.replace(recipe(), tokenizer=tokenizer)
    paths = [write(tmp_path / "a.jsonl", 30), write(tmp_path / "b.jsonl", 20)]
    facts, after = preparation._facts(paths, before), before
    assert preparation._facts(paths, dataclasses.replace(before)) == facts
    if change == "data":
        data = paths[0].read_bytes()
        paths[0].write_bytes(data.replace(b"License", b"Licence", 1))
    elif change == "order":
        paths.reverse()
    elif change == "kind":
        paths[0] = paths[0].rename(tmp_path / "a.txt")
    elif change == "length":
        after = dataclasses.replace(before, length=401)
    elif change == "options":
        after = dataclasses.replace(before, template_options={"a": 1})
    elif change == "last turn":
        after = dataclasses.replace(before, only_last_turn=True)
    elif change == "packing":
        after = dataclasses.replace(before, packing=False)
    elif change == "block":
        monkeypatch.setattr(preparation, "BLOCK_BYTES", 5)
    else:
        name, old, new = {
            "tokenizer": ("tokenizer.json", '"<|im_end|>"', '"<|im_END|>"'),
            "template": ("tokenizer_config.json", "<|im_start|>", "<|im_begin|>"),
            "model": ("config.json", '"qwen3"', '"llama"'),  # which chooses a class where tokenizer.json is missing
        }[change]
        if not (tokenizer / name).read_text().count(old):
            name = "chat_template.jinja"
        (tokenizer / name).write_text((tokenizer / name).read_text().replace(old, new, 1))
    assert preparation._facts(paths, after) != facts


def test_the_recipe_is_part_of_the_key(tmp_path):
    """Text and conversations of one file are not the same rows."""
    path, target = write(tmp_path / "a.jsonl", 5), GOLDEN / "qwen3/target"
    assert preparation._facts([path], TextRecipe(target, 400)) != preparation._facts([path], recipe())


def test_names_of_tokenizer_files_count(tmp_path):
    """The same content under another name is read otherwise."""
    (tmp_path / "added_tokens.json").write_text("{}")
    facts = TextRecipe(tmp_path, 8).facts()
    (tmp_path / "added_tokens.json").rename(tmp_path / "special_tokens_map.json")
    assert TextRecipe(tmp_path, 8).facts() != facts


def test_a_file_that_changes_while_it_is_read(tmp_path, monkeypatch):
    """Rows of another content are not kept under this one's key, now or after an interrupt."""
    path, make, original = write(tmp_path / "a.jsonl", 30), preparation._make, (tmp_path / "a.jsonl").read_bytes()

    def changed(*arguments):
        with path.open("ab") as stream:
            stream.write(SOURCE[0])
        make(*arguments)

    monkeypatch.setattr(preparation, "_make", changed)
    with pytest.raises(UserError, match="changed while they were read"):
        prepare([str(path)], recipe(), tmp_path / "cache", 1)
    assert not list((tmp_path / "cache").glob("*.work"))

    path.write_bytes(original)
    monkeypatch.setattr(preparation, "_finish", None)  # a kill after the parts were made of the changed file
    with monkeypatch.context() as patch, pytest.raises(TypeError):
        patch.setattr(preparation, "_stamps", lambda paths: [[0, 0, 0]])
        prepare([str(path)], recipe(), tmp_path / "cache", 1)
    path.write_bytes(original)
    monkeypatch.undo()
    assert prepare([str(path)], recipe(), tmp_path / "cache", 1).report.read == 30


def test_goes_on_where_it_was_interrupted(tmp_path, small_blocks, monkeypatch):
    """What was finished is not made again, and the end is that of a run in one go."""
    pattern = [str(write(tmp_path / "a.jsonl", 100))]
    whole = prepare(pattern, recipe(), tmp_path / "whole", 1)
    make_part, made = preparation._make_part, []

    def interrupted(opened, work, number, blocks):
        if number in stops:
            stops.remove(number)
            raise KeyboardInterrupt
        made.append(number)
        make_part(opened, work, number, blocks)

    monkeypatch.setattr(preparation, "_make_part", interrupted)
    stops = [2, 4, 9]
    for _ in range(3):
        with pytest.raises(KeyboardInterrupt):
            prepare(pattern, recipe(), tmp_path / "parts", 1)
        assert not list((tmp_path / "parts").glob(f"*/{MANIFEST}"))
    rows = prepare(pattern, recipe(), tmp_path / "parts", 1)
    assert made == sorted(set(made)) == [*range(made[-1] + 1)]
    assert rows.fingerprint == whole.fingerprint and rows.report == whole.report and rejected(rows) == rejected(whole)
    assert {path.name for path in rows.directory.iterdir()} == {path.name for path in whole.directory.iterdir()}


# ---- processes that end too early


def start(pattern, cache, processes=2, block_bytes=4000) -> subprocess.Popen:
    command = [sys.executable, "-m", "tests.data.preparing", *map(str, (pattern, cache, processes, block_bytes))]
    environment = os.environ | {"PYTHONPATH": str(GOLDEN.parents[1])}
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, cwd=GOLDEN.parents[1]
    )


def finish(process: subprocess.Popen) -> tuple[Rows, list[str]]:
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    *log, directory, peak = out.splitlines()
    return Rows(Path(directory)), [*log, peak]


def children(pid: int) -> list[int]:
    return [int(child) for path in Path(f"/proc/{pid}/task").glob("*/children") for child in path.read_text().split()]


@pytest.mark.parametrize("kills", [1, pytest.param(20, marks=pytest.mark.slow)])
def test_killed_at_random_moments(tmp_path, kills):
    """SIGKILL, wherever it falls: a later run ends with the rows of an undisturbed one."""
    path, generator, killed = write(tmp_path / "a.jsonl", 1600), random.Random(kills), 0
    whole, _ = finish(start(path, tmp_path / "whole"))
    for attempt in range(kills):
        cache = tmp_path / f"killed{attempt}"
        for moment in sorted(generator.sample(range(140), 3)):  # several kills on the way of one preparation
            process = start(path, cache)
            while progress(cache) < moment and process.poll() is None:
                time.sleep(0.002)
            time.sleep(generator.uniform(0, 0.05))
            killed += process.poll() is None
            process.kill()
            process.communicate()
        rows, _ = finish(start(path, cache))
        assert rows.fingerprint == whole.fingerprint and rows.report == whole.report
        assert content(rows) == content(whole) and rejected(rows) == rejected(whole)
    assert killed >= kills, "most kills came in time"


def progress(cache: Path) -> int:
    """Parts that are made, those in shards included."""
    return 4 * len(list(cache.glob("*.work/shard-*.json"))) + len(list(cache.glob("*.work/part-*.json")))


def test_two_at_once(tmp_path):
    """The second waits for the first, says so, and makes nothing again."""
    path = write(tmp_path / "a.jsonl", 2000)
    runs = [start(path, tmp_path / "cache") for _ in range(2)]
    (first, log1), (second, log2) = map(finish, runs)
    assert first.directory == second.directory and first.fingerprint == second.fingerprint
    assert sum("waiting for another process" in line for line in [*log1, *log2]) == 1
    assert content(first) == content(prepare([str(path)], recipe(), tmp_path / "alone", 1))


@pytest.mark.parametrize("processes", [1, 2])
def test_stopped(tmp_path, processes):
    """SIGTERM ends it soon, with its status and without a traceback; the work is kept, and what was half done goes."""
    path = write(tmp_path / "a.jsonl", 8000)
    process = start(path, tmp_path / "cache", processes)
    while not progress(tmp_path / "cache"):
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=20)
    assert process.returncode == 143 and "Traceback" not in err
    assert progress(tmp_path / "cache")
    rows, _ = finish(start(path, tmp_path / "cache", processes))
    assert rows.report.used == 7600 and not list(rows.directory.glob(".*"))


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs /proc")
def test_a_process_that_dies(tmp_path):
    """A worker ended from outside is one clear line; those of a killed parent do not live on."""
    path = write(tmp_path / "a.jsonl", 20000)
    for victim in ("worker", "parent"):
        process = start(path, tmp_path / victim)
        deadline = time.monotonic() + 60
        while not list((tmp_path / victim).glob("*.work/part-*.json")):
            assert time.monotonic() < deadline and process.poll() is None
            time.sleep(0.02)
        workers = [pid for pid in children(process.pid) if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()]
        assert len(workers) == 2
        os.kill(workers[0] if victim == "worker" else process.pid, signal.SIGKILL)
        _, err = process.communicate(timeout=60)
        if victim == "worker":
            assert process.returncode == 2
            assert next(line for line in err.splitlines() if line.startswith("error: ")).endswith("data.processes")
            assert "Traceback" not in err
        deadline = time.monotonic() + 20
        while any(Path(f"/proc/{pid}").exists() for pid in workers):
            assert time.monotonic() < deadline, f"the workers outlive the {victim}"
            time.sleep(0.05)


@pytest.mark.slow
def test_memory_does_not_grow_with_the_file(tmp_path):
    """Eight times the data, the same peak in the process that reads, to a fifth."""
    peaks = []
    for records in (8000, 64000):
        _, (*_, peak) = finish(start(write(tmp_path / "a.jsonl", records), tmp_path / str(records), 2, 2**20))
        peaks.append(int(peak))
    assert peaks[1] < 1.2 * peaks[0], peaks


# ---- bad input


def test_no_usable_record(tmp_path):
    """An error that says why, and nothing left behind."""
    for lines, reason in (
        (b"{\n{\n", r"among 2 \(malformed JSON: 2; the first: .*a\.jsonl:1\)"),
        (b"\n", "the files are empty"),
    ):
        (tmp_path / "a.jsonl").write_bytes(lines)
        with pytest.raises(UserError, match=reason):
            prepare([str(tmp_path / "a.jsonl")], recipe(), tmp_path / "cache", 1)
        assert [path for path in (tmp_path / "cache").iterdir() if not path.name.endswith(".lock")] == []


def test_damage_is_seen(tmp_path):
    """A file cut short is refused at once, a changed byte when its row is read."""
    rows = prepare([str(write(tmp_path / "a.jsonl", 30))], recipe(), tmp_path / "cache", 1)
    shard = next(rows.directory.glob("shard-*"))
    whole = shard.read_bytes()
    damaged = bytearray(whole)
    first = damaged.find(b"\x28\xb5\x2f\xfd")  # where zstd begins
    damaged[first + 200] ^= 0xFF
    shard.write_bytes(damaged)
    with pytest.raises(UserError, match="row 0 is damaged"):
        Rows(rows.directory)[0]
    shard.write_bytes(whole[:-1])
    with pytest.raises(UserError, match="damaged or missing"):
        Rows(rows.directory)
    shard.unlink()
    with pytest.raises(UserError, match="damaged or missing"):
        prepare([str(tmp_path / "a.jsonl")], recipe(), tmp_path / "cache", 1)
    (rows.directory / MANIFEST).write_text("{}")
    with pytest.raises(UserError, match=r"manifest\.json: damaged"):
        Rows(rows.directory)
    (rows.directory / MANIFEST).unlink()
    with pytest.raises(UserError, match="not a complete preparation; remove it"):
        prepare([str(tmp_path / "a.jsonl")], recipe(), tmp_path / "cache", 1)


def test_rows_outlive_their_directory(tmp_path, small_blocks):
    """A cache that is emptied while a run reads from it does not end the run."""
    rows = prepare([str(write(tmp_path / "a.jsonl", 60))], recipe(), tmp_path / "cache", 1)
    assert len(list(rows.directory.glob("shard-*"))) > 1
    before, unread = content(rows), Rows(rows.directory)
    shutil.rmtree(rows.directory)
    assert content(unread) == before


@pytest.mark.parametrize("processes", [1, 2])
def test_a_tokenizer_that_cannot_be_used(tmp_path, small_blocks, make_tokenizer, processes):
    """It is the same one line where only the working processes read it."""
    make_tokenizer(eos_token=None).save_pretrained(tmp_path / "tokenizer")
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "a"}\n' * 1000)
    with pytest.raises(UserError, match="eos_token"):
        prepare([str(path)], TextRecipe(tmp_path / "tokenizer", 8), tmp_path / "cache", processes)


def test_an_error_of_a_worker_is_the_same_one_line(tmp_path, small_blocks):
    """A template that cannot be located stops the work with the record's place, however many processes."""
    tokenizer = tmp_path / "tokenizer"
    shutil.copytree(GOLDEN / "qwen3/target", tokenizer, ignore=shutil.ignore_patterns("*.safetensors"))
    config = tokenizer / "tokenizer_config.json"
    values = json.loads(config.read_text())
    values["chat_template"] = (
        "{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}"
        "{% if messages[0].content == 'odd' %}{{ messages[1].content }}{% endif %}"
    )
    config.write_text(json.dumps(values))
    (tokenizer / "chat_template.jinja").unlink(missing_ok=True)
    path = write(tmp_path / "a.jsonl", 50)
    turns = [{"role": "user", "content": "odd"}, {"role": "assistant", "content": "a"}]
    odd = {"id": "odd", "conversations": turns}
    path.write_bytes(path.read_bytes() + json.dumps(odd).encode() + b"\n")
    for processes in (1, 2):
        with pytest.raises(UserError, match=r"a\.jsonl:51: .*cannot be"):
            prepare(
                [str(path)], dataclasses.replace(recipe(), tokenizer=tokenizer), tmp_path / str(processes), processes
            )


def test_finding_what_is_prepared_makes_nothing(tmp_path):
    """A plan asks for the rows of a run without the work that makes them."""
    arguments = [str(write(tmp_path / "a.jsonl", 12))], recipe(), tmp_path / "cache"
    assert find_prepared(*arguments) is None
    assert not arguments[2].exists()
    rows = prepare(*arguments, 1)
    assert len(find_prepared(*arguments)) == len(rows)
    write(tmp_path / "a.jsonl", 13)
    assert find_prepared(*arguments) is None
