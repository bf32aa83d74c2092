"""`train` on the golden models: runs, goes on, refuses. One process, tiny steps."""

import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys
import time

import numpy as np
import pytest
from safetensors.numpy import load_file

from export.to_hf import to_hf
from export.to_sglang import to_sglang
from osprey_jax.command import UserError
from osprey_jax.data.rows import Rows
from osprey_jax.data.trimming import most_frequent_tokens
from osprey_jax.models import hf
from osprey_jax.training import loop
from tests.checkpoints import assert_same_tensors, read, write
from tests.conftest import GOLDEN
from tests.train_runs import metrics

CASE = GOLDEN / "qwen3"


def test_distillation_learns_and_exports(distill, tmp_path):
    """A run leaves metrics, events, config and model; the export reads back to the bit and says what SGLang needs."""
    status, out, _ = distill("steps=40", "checkpoints.every=20", "eval_every=20", "log_every=10")
    assert status == 0 and "done: step 40" in out
    run = tmp_path / "run"
    train_losses = metrics(run)
    assert train_losses[40]["loss"] < 0.9 * train_losses[1]["loss"]
    assert set(metrics(run, "eval")) == {20, 40} and "accuracy_1" in metrics(run, "eval")[40]
    assert list((run / "tensorboard").glob("events*")) and (run / "rejected.jsonl").exists()

    assert to_sglang(run, tmp_path / "export") == 40
    config = read(tmp_path / "export" / "config.json")
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [1, 3, 5]
    assert config["tie_word_embeddings"] is False and config["max_position_embeddings"] >= 512
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"] == 1e6 and config["rope_scaling"] is None
    assert (tmp_path / "export" / "tokenizer.json").read_bytes() == (CASE / "target" / "tokenizer.json").read_bytes()
    exported = load_file(tmp_path / "export" / "model.safetensors")
    start = load_file(CASE / "expected" / "converted" / "model.safetensors")
    assert exported.keys() == start.keys() and np.any(exported["fc.weight"] != start["fc.weight"])

    # The export as a start: a run of no steps writes the same bits again.
    status, _, _ = distill(f"run_dir={tmp_path / 'again'}", f"drafter.checkpoint={tmp_path / 'export'}", "steps=0")
    assert status == 0 and to_sglang(tmp_path / "again", tmp_path / "export2") == 0
    assert_same_tensors(load_file(tmp_path / "export2" / "model.safetensors"), exported)


def test_goes_on_after_a_stop(distill, tmp_path, monkeypatch):
    """A stopped run, run again, ends with the weights and losses of one that was not stopped."""
    distill(f"run_dir={tmp_path / 'whole'}")
    compiled = loop.compiled

    def stopping(*arguments):
        step = compiled(*arguments)

        def then_stop(state, *rest):
            state, result = step(state, *rest)
            if int(state.step) == 3:
                monkeypatch.setattr(loop, "compiled", compiled)
                loop.signal.raise_signal(loop.signal.SIGTERM)
            return state, result

        return then_stop

    monkeypatch.setattr(loop, "compiled", stopping)
    status, out, _ = distill()
    assert status == 0 and "stopped at step 3 of 6, saved" in out
    status, out, _ = distill()
    assert status == 0 and "steps 3..6" in out
    whole, parts = metrics(tmp_path / "whole"), metrics(tmp_path / "run")
    assert [whole[i]["loss"] for i in whole] == [parts[i]["loss"] for i in range(1, 7)]
    for name in ("whole", "run"):
        to_sglang(tmp_path / name, tmp_path / f"{name}-export")
    assert_same_tensors(
        load_file(tmp_path / "run-export" / "model.safetensors"),
        load_file(tmp_path / "whole-export" / "model.safetensors"),
    )


def test_goes_on_after_a_kill(distill, tmp_path):
    """SIGKILL soon after the first checkpoint: the same command goes on from a checkpoint, to the end."""
    command = [sys.executable, "-m", "osprey_jax.train", "--config", str(tmp_path / "distill.yaml"), "steps=60"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, cwd=GOLDEN.parents[1])
    deadline = time.monotonic() + 240
    while not (tmp_path / "run" / "checkpoints" / "2").exists():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    process.kill()
    process.wait()
    status, out, _ = distill("steps=60")
    first = int(out.split("steps ")[1].split("..")[0])
    assert status == 0 and 2 <= first < 60 and "done: step 60" in out
    assert sorted(metrics(tmp_path / "run")) == list(range(1, 61))


def test_bfloat16_keeps_float32_masters(distill, tmp_path):
    """Products in bfloat16 change the loss by their rounding alone; what is saved is float32."""
    for dtype in ("float32", "bfloat16"):
        status, _, err = distill(f"run_dir={tmp_path / dtype}", f"compute_dtype={dtype}", "steps=2")
        assert status == 0, err
    full, half = (metrics(tmp_path / dtype)[1] for dtype in ("float32", "bfloat16"))
    assert full["loss"] != half["loss"] and abs(half["loss"] / full["loss"] - 1) < 0.02
    assert abs(half["grad_norm"] / full["grad_norm"] - 1) < 0.05
    to_sglang(tmp_path / "bfloat16", tmp_path / "export")
    assert load_file(tmp_path / "export" / "model.safetensors")["fc.weight"].dtype == np.float32


def test_finished_run_does_nothing(distill):
    distill()
    status, out, _ = distill()
    assert status == 0 and "already at step 6 of 6" in out


def test_another_config_is_not_a_continuation(distill):
    """What changes numbers is refused with the difference; what does not is free."""
    distill()
    status, _, err = distill("optimizer.learning_rate=2e-3")
    assert status == 2 and "config.optimizer.learning_rate 0.001, now it is 0.002" in err
    assert distill("log_every=5", "checkpoints.keep=1")[0] == 0


def test_non_finite_loss_stops_before_it_is_saved(distill, tmp_path):
    """The step and its records are named, and the last good state stays the newest."""
    status, _, err = distill("optimizer.learning_rate=1e30", "optimizer.warmup_fraction=0", "checkpoints.every=1")
    assert status == 2 and "nothing of it is saved" in err and "r1" in err
    saved = [int(path.name) for path in (tmp_path / "run" / "checkpoints").iterdir() if path.name.isdigit()]
    failed = int(err.split("step ")[1].split(":")[0])
    assert max(saved, default=0) < failed


def test_description_is_that_of_the_checkpoints(distill, tmp_path):
    """A run that ends before its first checkpoint leaves nothing that a later one, with other taps, would export."""
    missing = tmp_path / "no-weights"
    shutil.copytree(CASE / "expected" / "converted", missing)
    (missing / "model.safetensors").unlink()
    assert_refused(distill(f"drafter.checkpoint={missing}"), tmp_path, "model.safetensors: no such file")
    distill("optimizer.learning_rate=1e30", "optimizer.warmup_fraction=0", "checkpoints.every=100")
    assert not [path for path in (tmp_path / "run" / "checkpoints").iterdir() if path.name.isdigit()]
    assert distill("tap_layers=[0, 2, 4]", "steps=1")[0] == 0
    to_sglang(tmp_path / "run", tmp_path / "export")
    config = read(tmp_path / "export" / "config.json")
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [0, 2, 4]


@pytest.mark.parametrize(("layers", "vocabulary"), [(1, None), (2, 300)])
def test_eagle3_from_scratch(distill, tmp_path, layers, vocabulary):
    """The baselines are the same command: target's embedding frozen, 1 or 2 layers, vocabulary whole or trimmed."""
    start = f"drafter={{scratch: {{num_layers: {layers}}}, draft_vocab_size: {vocabulary or 'null'}}}"
    status, out, err = distill(start)
    assert status == 0, err
    assert "embedding of the target, frozen" in out
    to_sglang(tmp_path / "run", tmp_path / "export")
    tensors, config = load_file(tmp_path / "export" / "model.safetensors"), read(tmp_path / "export" / "config.json")
    embedding = load_file(CASE / "target" / "model.safetensors")["model.embed_tokens.weight"]
    np.testing.assert_array_equal(tensors["embed_tokens.weight"], embedding)
    assert ("midlayer.mlp.up_proj.weight" in tensors) == (layers == 1)
    assert config["architectures"] == ["LlamaForCausalLMEagle3"] and config["swap_h_and_emb"] is False
    assert len(tensors["lm_head.weight"]) == tensors["t2d"].sum() == config["draft_vocab_size"] == (vocabulary or 456)
    if vocabulary:
        assert "draft vocabulary (most frequent): 300 of 456 tokens" in out
        np.testing.assert_array_equal(tensors["d2t"] + np.arange(300), np.flatnonzero(tensors["t2d"]))


def test_converted_drafter_with_a_trimmed_head(distill, tmp_path):
    """The head keeps the rows of the tokens that the data supervises most, and so their logits; the rest is whole."""
    status, out, err = distill("drafter.draft_vocab_size=40", "batch_size=8", "steps=0")
    assert status == 0, err
    rows = Rows(next((tmp_path / "prepared").glob("*/manifest.json")).parent)
    arrays = [rows[i] for i in range(len(rows))]
    count = sum(np.bincount(row["token_ids"][row["loss_mask"] > 0], minlength=456) for row in arrays)
    kept, covered = most_frequent_tokens(count, 40)
    assert 0.5 < covered < 1
    assert f"draft vocabulary (most frequent): 40 of 456 tokens, {covered:.1%} of the supervised ones" in out

    to_sglang(tmp_path / "run", tmp_path / "export")
    assert read(tmp_path / "export" / "config.json")["draft_vocab_size"] == 40
    tensors = load_file(tmp_path / "export" / "model.safetensors")
    whole = load_file(CASE / "expected" / "converted" / "model.safetensors")
    expected = {"lm_head.weight": whole["lm_head.weight"][kept]} | hf.vocabulary_tensors(kept, 456)
    assert_same_tensors(tensors, whole | expected)
    trimmed, untrimmed = hf.load_drafter(tmp_path / "export"), hf.load_drafter(CASE / "expected" / "converted")
    stream = np.random.default_rng(0).normal(size=(1, 50, 32)).astype(np.float32)
    logits = trimmed.logits(stream)
    np.testing.assert_allclose(logits, untrimmed.logits(stream)[..., kept], rtol=1e-5, atol=1e-5)
    drafted = trimmed.to_target_ids(np.argmax(logits, axis=-1))
    np.testing.assert_array_equal(drafted, kept[np.argmax(untrimmed.logits(stream)[..., kept], axis=-1)])


def test_warm_start_keeps_its_own_vocabulary(distill, tmp_path):
    """Other data would choose other tokens: the checkpoint's map stays, what it covers is said, another is refused."""
    assert distill("drafter.draft_vocab_size=40", "steps=30", "checkpoints.every=30")[0] == 0
    losses = metrics(tmp_path / "run")
    assert losses[30]["loss"] < losses[1]["loss"]
    export = tmp_path / "export"
    to_sglang(tmp_path / "run", export)
    first = load_file(export / "model.safetensors")
    start = load_file(CASE / "expected" / "converted" / "model.safetensors")
    assert np.any(first["embed_tokens.weight"] != start["embed_tokens.weight"])  # its own, trained

    words = {"role": "user", "content": "x"}, {"role": "assistant", "content": "zzz qqq " * 9}
    (tmp_path / "other.jsonl").write_text(json.dumps({"id": "a", "conversations": words}) + "\n")
    again = [f"drafter.checkpoint={export}", f"data.train=[{tmp_path / 'other.jsonl'}]", "batch_size=1", "steps=0"]
    for i, size in enumerate(["null", "40"]):
        status, out, err = distill(*again, f"drafter.draft_vocab_size={size}", f"run_dir={tmp_path / f'again{i}'}")
        assert status == 0, err
        shown = re.search(r"draft vocabulary \(of the checkpoint\): 40 of 456 tokens, (\S+)% of the supervised", out)
        assert 0 < float(shown[1]) < 90
        to_sglang(tmp_path / f"again{i}", tmp_path / f"export{i}")
        assert_same_tensors(load_file(tmp_path / f"export{i}" / "model.safetensors"), first)
    for size in (41, 456):
        status, _, err = distill(*again, f"drafter.draft_vocab_size={size}", f"run_dir={tmp_path / 'refused'}")
        assert status == 2 and err.count("\n") == 1 and not (tmp_path / "refused").exists()
        assert f"drafter.draft_vocab_size {size} contradicts {export}, which keeps its own" in err


def test_pretraining_and_export_to_hf(pretrain, tmp_path):
    """A backbone learns the text; its export is a checkpoint that training starts from with the same bits."""
    status, _, err = pretrain("steps=40")
    assert status == 0, err
    losses = metrics(tmp_path / "run")
    assert losses[40]["loss"] < 0.8 * losses[1]["loss"]
    assert to_hf(tmp_path / "run", tmp_path / "export") == 40
    exported = load_file(tmp_path / "export" / "model.safetensors")
    assert exported.keys() == load_file(tmp_path / "backbone" / "model.safetensors").keys()  # tied stays tied
    pretrain(f"run_dir={tmp_path / 'again'}", f"model.checkpoint={tmp_path / 'export'}", "steps=0")
    to_hf(tmp_path / "again", tmp_path / "export2")
    assert_same_tensors(load_file(tmp_path / "export2" / "model.safetensors"), exported)


def test_pretraining_from_random_values(pretrain, tmp_path):
    """A config and a tokenizer are a start too, and the seed decides the values."""
    start = f"model={{config: {tmp_path / 'backbone' / 'config.json'}, tokenizer: {CASE / 'source'}}}"
    exports = []
    for run, seed in (("a", 0), ("b", 0), ("c", 1)):
        status, _, err = pretrain(start, f"run_dir={tmp_path / run}", f"seed={seed}", "steps=0")
        assert status == 0, err
        to_hf(tmp_path / run, tmp_path / f"{run}-export")
        exports.append(load_file(tmp_path / f"{run}-export" / "model.safetensors"))
    assert_same_tensors(exports[1], exports[0])
    assert np.any(exports[2]["model.embed_tokens.weight"] != exports[0]["model.embed_tokens.weight"])


def test_each_stage_has_its_export(distill, pretrain, tmp_path):
    distill("steps=0")
    pretrain(f"run_dir={tmp_path / 'text'}", "steps=0")
    with pytest.raises(UserError, match=r"stage distill; export it with `python -m export\.to_sglang`"):
        to_hf(tmp_path / "run", tmp_path / "x")
    with pytest.raises(UserError, match=r"stage pretrain; export it with `python -m export\.to_hf`"):
        to_sglang(tmp_path / "text", tmp_path / "x")
    with pytest.raises(UserError, match="no complete checkpoint of step 5; there are 0"):
        to_sglang(tmp_path / "run", tmp_path / "x", step=5)
    assert not (tmp_path / "x").exists()


# ---- bad input: one line, non-zero, nothing written


def changed(tmp_path, source, **changes):
    """A copy of a checkpoint whose config says something else."""
    out = tmp_path / "changed"
    shutil.copytree(source, out)
    write(out / "config.json", read(out / "config.json") | changes)
    return out


def assert_refused(result, tmp_path, *words):
    status, _, err = result
    assert status == 2 and err.count("\n") == 1 and err.startswith("error: ")
    assert all(word in err for word in words), err
    assert not (tmp_path / "run").exists()


def test_drafter_for_another_target(distill, tmp_path):
    other = changed(tmp_path, CASE / "expected" / "converted", target_hidden_size=64)
    assert_refused(distill(f"drafter.checkpoint={other}"), tmp_path, "target_hidden_size is 64", "hidden size is 48")


@pytest.mark.parametrize("taps", ["[1, 1, 5]", "[1, 3, 9]"])
def test_bad_taps(distill, tmp_path, taps):
    assert_refused(distill(f"tap_layers={taps}"), tmp_path, taps, "three different blocks")


def test_taps_that_contradict_the_checkpoint(distill, tmp_path):
    config = {"eagle_aux_hidden_state_layer_ids": [0, 2, 4], "use_aux_hidden_state": True}
    other = changed(tmp_path, CASE / "expected" / "converted", eagle_config=config)
    assert_refused(distill(f"drafter.checkpoint={other}", "tap_layers=[1, 3, 5]"), tmp_path, "[0, 2, 4]", "contradict")


@pytest.mark.parametrize("start", ["checkpoint: " + str(CASE / "expected" / "converted"), "scratch: {num_layers: 1}"])
def test_draft_vocabulary_larger_than_the_targets(distill, tmp_path, start):
    result = distill(f"drafter={{{start}, draft_vocab_size: 457}}")
    assert_refused(result, tmp_path, "drafter.draft_vocab_size 457 exceeds the target's vocabulary of 456")


def test_tokenizer_that_does_not_fit(distill, pretrain, tmp_path):
    """A tokenizer with ids that the model has no rows for."""
    other = tmp_path / "other"
    shutil.copytree(CASE / "target", other)
    shutil.copyfile(tmp_path / "backbone" / "config.json", tmp_path / "small.json")
    start = f"model={{config: {tmp_path / 'small.json'}, tokenizer: {other}}}"
    assert_refused(pretrain(start), tmp_path, "the tokenizer needs 448 rows, the model has only 400")


def test_missing_files(distill, tmp_path):
    assert_refused(distill("target=nowhere"), tmp_path, "nowhere: no such directory")
    assert_refused(distill("data.train=[nowhere.jsonl]"), tmp_path, "nowhere.jsonl: matches no file")
    assert_refused(distill("drafter.checkpoint=nowhere"), tmp_path, "nowhere: no such directory")


def test_empty_data(distill, pretrain, tmp_path):
    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "none.jsonl").write_text('{"id": "a", "conversations": []}\n')
    for name in ("empty", "none"):
        assert_refused(distill(f"data.train=[{tmp_path / name}.jsonl]"), tmp_path, f"{name}.jsonl")
    (tmp_path / "empty.txt").write_text("")
    assert_refused(pretrain(f"data.train=[{tmp_path / 'empty.txt'}]"), tmp_path, "empty.txt")


def test_devices_do_not_divide(distill, tmp_path):
    assert_refused(distill("mesh.tensor=3"), tmp_path, "mesh.tensor 3 does not divide the", "device(s)")
    assert_refused(distill("mesh.data=3"), tmp_path, "data 3 x tensor 1 is not the", "device(s)")


@pytest.mark.multidevice
def test_devices_that_do_not_divide_the_batch(distill, tmp_path):
    assert_refused(distill("batch_size=12"), tmp_path, "12 rows, which 8 devices do not divide", "multiple of 8")


def test_rows_longer_than_the_context(distill, tmp_path):
    assert_refused(distill("data.length=1024"), tmp_path, "data.length 1024 exceeds max_position_embeddings 512")


@pytest.mark.parametrize("name", ["thesis.txt", "config.yaml", "model"])
def test_run_directory_of_something_else(distill, tmp_path, name):
    """Nothing of another's is overwritten, not even under a name that a run uses."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / name).write_text("mine")
    status, _, err = distill()
    assert status == 2 and "holds something that is not a run" in err
    assert [path.read_text() for path in (tmp_path / "run").iterdir()] == ["mine"]


def test_file_that_cannot_be_written(distill, tmp_path):
    """What the system refuses is one line too."""
    (tmp_path / "file").write_text("")
    status, _, err = distill(f"run_dir={tmp_path / 'file' / 'run'}")
    assert status == 2 and err.count("\n") == 1 and "file" in err


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"architectures": 5}, "architecture 5"),
        ({"eagle_config": [1]}, "eagle_config [1]"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1.5, 3, 5]}}, "1.5"),
        ({"swap_h_and_emb": "false"}, "neither true nor false"),
        ({"target_hidden_size": None}, "target_hidden_size is None"),
        ({"draft_vocab_size": 0}, "draft_vocab_size is 0"),
    ],
)
def test_malformed_drafter_config(distill, tmp_path, change, word):
    other = changed(tmp_path, CASE / "expected" / "converted", **change)
    assert_refused(distill(f"drafter.checkpoint={other}"), tmp_path, word)


def test_one_compilation_a_run(distill, tmp_path, monkeypatch):
    """Of the update, ahead of the first step, and of the evaluation, whatever comes between the steps; also in a run
    that goes on, whose state comes from a checkpoint."""
    made, compilations, compiled = [], [], loop.compiled
    keep = lambda make: lambda *arguments: made.append(make(*arguments)) or made[-1]
    for name in ("make_train_step", "make_eval_step"):
        monkeypatch.setattr(loop, name, keep(getattr(loop, name)))
    monkeypatch.setattr(loop, "compiled", lambda *arguments: compilations.append(0) or compiled(*arguments))
    assert distill("eval_every=2")[0] == 0
    assert len(compilations) == 1
    assert [step._cache_size() for step in made] == [0, 1]  # the update runs as it was compiled ahead
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "6")
    status, out, _ = distill("eval_every=2")
    assert status == 0 and "steps 4..6" in out
    assert len(compilations) == 2
    assert [step._cache_size() for step in made[2:]] == [0, 1]


def test_only_metrics_come_back(distill, monkeypatch):
    """In the steady state nothing moves between host and devices unless the loop says so."""
    compiled = loop.compiled

    def guarded(*arguments):
        step, calls = compiled(*arguments), []

        def run(*arguments):
            calls.append(0)
            result = step(*arguments)
            if len(calls) == 2:
                loop.jax.config.update("jax_transfer_guard", "disallow")
            if len(calls) == 6:
                loop.jax.config.update("jax_transfer_guard", "allow")
            return result

        return run

    monkeypatch.setattr(loop, "compiled", guarded)
    try:
        status, out, error = distill("checkpoints.every=100")
        assert status == 0, out + error
    finally:
        loop.jax.config.update("jax_transfer_guard", "allow")


def test_waiting_for_data_counts_where_it_was_spent(distill, tmp_path, monkeypatch):
    """A batch is fetched while the step before runs: no interval's share exceeds 1, and the last waits for none."""
    fetch = loop._fetch
    slow = lambda batch: dataclasses.replace(batch, waited=batch.waited + 0.1)
    monkeypatch.setattr(loop, "_fetch", lambda *arguments: time.sleep(0.1) or slow(fetch(*arguments)))
    assert distill()[0] == 0
    waits = {step: line["data_wait"] for step, line in metrics(tmp_path / "run").items() if step > 1}
    assert all(0 <= wait <= 1 for wait in waits.values()) and waits[3] > 0 and waits[6] == 0, waits


def test_the_next_batch_is_fetched_while_a_step_runs(distill, monkeypatch):
    """Step n is under way before batch n+1 is asked for, and its metrics are read after step n+1 is."""
    events = []
    note = lambda name, function: lambda *arguments: events.append(name) or function(*arguments)
    compiled = loop.compiled
    monkeypatch.setattr(loop, "compiled", lambda *arguments: note("step", compiled(*arguments)))
    monkeypatch.setattr(loop, "_fetch", note("fetch", loop._fetch))
    monkeypatch.setattr(loop._Unread, "read", note("read", loop._Unread.read))
    assert distill("checkpoints.every=100", "steps=4")[0] == 0
    first, middle, last = ["fetch", "step", "fetch"], ["step", "fetch", "read"] * 2, ["step", "read", "read"]
    assert events == first + middle + last


def test_compiled_once_for_all_runs(distill, tmp_path):
    """With a compilation cache the second process finds what the first compiled."""
    cache = tmp_path / "compiled"
    assert distill("steps=0")[0] == 0  # prepares, and writes the config
    command = [sys.executable, "-m", "osprey_jax.train", "--config", str(tmp_path / "distill.yaml")]
    command += ["steps=1", f"compilation_cache={cache}"]
    environment = os.environ | {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    found = []
    for run in ("first", "second"):
        subprocess.run([*command, f"run_dir={tmp_path / run}"], env=environment, check=True, capture_output=True)
        found.append({path.name for path in cache.iterdir() if not path.name.endswith("-atime")})
    assert any("train_step" in name for name in found[0])
    assert found[1] == found[0]


def test_a_cache_in_the_run_is_refused(distill, tmp_path):
    """The run directory holds the run alone."""
    status, _, error = distill(f"compilation_cache={tmp_path / 'run' / 'compiled'}")
    assert status == 2 and "compilation_cache" in error and "lies in run_dir" in error
