import csv
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from osprey_jax.command import UserError
from osprey_jax.config import EvaluateConfig
from osprey_jax.decoding.generate import generate
from osprey_jax.decoding.requests import Request
from osprey_jax.decoding.speculate import speculate
from osprey_jax.decoding.target import open_target
from osprey_jax.evaluate import evaluate
from osprey_jax.evaluation import in_process
from osprey_jax.models.hf import load_drafter

GOLDEN = Path(__file__).parent / "golden/qwen3"
TARGET = GOLDEN / "target"


def conversation(name, content, *more):
    return {"id": name, "conversations": [{"role": "user", "content": content}, *more]}


ANSWER = {"role": "assistant", "content": "not asked"}
CODE = [conversation("c0", "of the"), conversation("c1", "software " * 5, ANSWER), conversation("c2", "license")]
PROSE = [conversation("p0", "you may"), conversation("p1", "free", ANSWER, {"role": "user", "content": "and then"})]


def write(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


@pytest.fixture(scope="module")
def drafters(tmp_path_factory):
    """The converted drafter, and one with other weights."""
    folder = tmp_path_factory.mktemp("drafters")
    for name in ("converted", "other"):
        shutil.copytree(GOLDEN / "expected/converted", folder / name)
    tensors = load_file(folder / "other/model.safetensors")
    tensors["lm_head.weight"] = np.roll(tensors["lm_head.weight"], 1, axis=0)
    save_file(tensors, folder / "other/model.safetensors")
    return {name: folder / name for name in ("converted", "other")}


@pytest.fixture
def config(tmp_path, drafters):
    write(tmp_path / "code.jsonl", CODE)
    write(tmp_path / "prose.jsonl", PROSE)

    def make(**changes):
        values = {
            "target": TARGET,
            "drafters": drafters,
            "prompts": {"code": tmp_path / "code.jsonl", "prose": tmp_path / "prose.jsonl"},
            "out": tmp_path / "out",
            "max_new_tokens": 20,
            "batch_size": 2,
        }
        return EvaluateConfig(**values | changes)

    return make


def results(config):
    return json.loads((config.out / "results.json").read_text())


def table(config, name):
    with (config.out / name).open() as stream:
        return list(csv.DictReader(stream))


def test_every_drafter_on_every_set(config, capsys):
    """The numbers in each file are those of the decoder, request by request, in the order of the input."""
    evaluate(config())
    found = results(config())
    pairs = [(result["arm"], result["prompts"]) for result in found["results"]]
    assert pairs == [("converted", "code"), ("converted", "prose"), ("other", "code"), ("other", "prose")]
    target = open_target(TARGET, {})
    model, drafter = target.load("float32"), load_drafter(config().drafters["other"])
    code = found["results"][2]
    assert [r["id"] for r in code["requests"]] == ["c0", "c1", "c2"]
    for record, r in zip(CODE, code["requests"], strict=True):
        request = Request(target.prompt_ids(record["conversations"][:1]), 20)
        options = {"tap_layers": (1, 3, 5), "draft_steps": 5, "stop_ids": target.stop_ids}
        [alone] = speculate(model, drafter, [request], **options)
        assert r["prompt_tokens"] == len(request.prompt)
        assert r["completion_tokens"] == len(alone.completion.token_ids)
        assert (r["verifications"], r["histogram"]) == (alone.verifications, list(alone.histogram))
        assert r["accepted_length"] == len(alone.completion.token_ids) / alone.verifications
        assert r["text"] == target.text(alone.completion.token_ids)
        assert r["matches_off"] is True
    assert code["accepted_length"] == np.mean([r["accepted_length"] for r in code["requests"]])
    assert len(table(config(), "requests.csv")) == 10
    assert [row["accepted_length"] for row in table(config(), "summary.csv")] == [
        str(result["accepted_length"]) for result in found["results"]
    ]
    assert table(config(), "comparisons.csv")[0]["measure"] == "accepted_length"
    assert [row["drafter"] for row in table(config(), "matrix.csv")] == ["converted", "other"]
    assert (config().out / "accepted_length.png").read_bytes().startswith(b"\x89PNG")
    assert f"{code['accepted_length']:.3f}" in capsys.readouterr().out
    assert found["config"]["max_new_tokens"] == 20 and set(found["versions"]) >= {"jax", "flax", "osprey_jax"}


def test_text_is_compared_with_the_targets_own(config, monkeypatch):
    """A decoder that changed the text would be reported, request by request."""

    def off_by_one(model, requests, **options):
        completions = generate(model, requests, **options)
        completions[0].token_ids[-1] += 1
        return completions

    monkeypatch.setattr(in_process, "generate", off_by_one)
    evaluate(config(prompts={"prose": config().prompts["prose"]}, batch_size=4))
    assert [result["differing"] for result in results(config())["results"]] == [1, 1]


def test_finished_parts_are_kept(config, monkeypatch):
    """A second run does what is missing or was made from something else, and nothing more."""
    calls = []

    def counted(*arguments, **options):
        calls.append(options["draft_steps"])
        if len(calls) == 3:
            raise KeyboardInterrupt
        return speculate(*arguments, **options)

    monkeypatch.setattr(in_process, "speculate", counted)
    with pytest.raises(KeyboardInterrupt):
        evaluate(config(batch_size=3))
    evaluate(config(batch_size=3))
    assert len(calls) == 3 + 2, "two of four parts were done before the interrupt"
    whole = results(config())["results"]
    monkeypatch.setattr(in_process, "generate", None)  # the target's own text is kept too
    evaluate(config(batch_size=2))
    assert len(calls) == 5 and results(config())["results"] == whole
    evaluate(config(batch_size=3, draft_steps=2))
    assert len(calls) == 9 and set(calls[5:]) == {2}


def test_changed_files_are_measured_again(config, drafters, tmp_path, monkeypatch):
    """A part belongs to its weights, prompts and settings, whatever their names."""
    calls = []

    def counted(*arguments, **options):
        calls.append(1)
        return speculate(*arguments, **options)

    monkeypatch.setattr(in_process, "speculate", counted)
    drafter = tmp_path / "mine"
    shutil.copytree(drafters["converted"], drafter)
    made = config(drafters={"mine": drafter}, prompts={"prose": config().prompts["prose"]})
    evaluate(made)
    shutil.copy(drafters["other"] / "model.safetensors", drafter)
    evaluate(made)
    write(made.prompts["prose"], PROSE[:1])
    evaluate(made)
    assert len(calls) == 3
    evaluate(made.model_copy(update={"draft_steps": 3}))
    evaluate(made.model_copy(update={"compute_dtype": "bfloat16", "max_new_tokens": 4}))
    evaluate(made.model_copy(update={"compute_dtype": "float32", "max_new_tokens": 4}))
    target = tmp_path / "target"
    shutil.copytree(made.target, target)
    (target / "more.bin").write_bytes(b"weights")
    evaluate(made.model_copy(update={"target": target, "max_new_tokens": 4}))
    assert len(calls) == 7
    assert not (made.out / "accepted_length.png").exists()


def test_what_is_not_asked_is_reported(config, capsys):
    """A prompt longer than the context, or none, never just goes missing."""
    write(config().prompts["prose"], [conversation("long", "free software " * 300), PROSE[0], {"id": "odd"}])
    evaluate(config(prompts={"prose": config().prompts["prose"]}))
    shown = capsys.readouterr().out
    assert "1 records skipped: the prompt exceeds the target's context" in shown
    assert "1 records skipped: not a conversation" in shown
    assert [r["id"] for r in results(config())["skipped"]["prose"]] == ["long", "odd"]
    write(config().prompts["prose"], [{"id": "odd"}])
    with pytest.raises(UserError, match="no usable prompt"):
        evaluate(config())


def edited(drafter, folder, **changes):
    shutil.copytree(drafter, folder)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return folder


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"target_hidden_size": 64}, "target_hidden_size is 64"),
        ({"vocab_size": 512}, "vocab_size is 512"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 9]}}, "mine: tap layers"),
    ],
)
def test_a_drafter_of_another_target_is_refused(config, drafters, tmp_path, changes, message):
    """Before anything is computed or written."""
    with pytest.raises(UserError, match=message):
        evaluate(config(drafters={"mine": edited(drafters["converted"], tmp_path / "mine", **changes)}))
    assert not config().out.exists()


def test_out_holding_something_else_is_left_alone(config):
    config().out.mkdir()
    (config().out / "thesis.txt").write_text("mine")
    with pytest.raises(UserError, match="is no evaluation"):
        evaluate(config())


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"drafters": {"../x": "x"}}, "is named with"),  # it would name a file outside of out
        ({"drafters": {}}, "drafters: names nothing to evaluate"),
        ({"prompts": {}}, "prompts: names nothing to evaluate"),
        ({"drafters": {"off": "x"}}, "off is the name of the target without speculation"),
        ({"trained_on": {"other": ["news"]}}, "trained_on: news is none of code, prose"),
        ({"trained_on": {"mine": ["code"]}}, "trained_on: mine is none of converted, other"),
        ({"timeout": 5}, "timeout does nothing with engine in_process"),
    ],
)
def test_contradictions_are_refused(config, changes, message):
    with pytest.raises(ValueError, match=message):
        config(**changes)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({}, "engine sglang needs servers"),
        ({"servers": {"off": "http://a:1"}}, "servers: none for converted, other"),
        ({"servers": {"of": "http://a:1"}, "sglang_python": "p"}, "servers: of is none of off, converted, other"),
        ({"servers": {"off": "a:1"}}, "is no base URL"),
        ({"servers": dict.fromkeys(("converted", "other"), "http://a:1")}, "two arms have one server"),
        ({"sglang_python": "p", "concurrency": [1, 1]}, "name each level once"),
        ({"sglang_python": "p", "batch_size": 2}, "batch_size does nothing with engine sglang"),
        (
            {"servers": {"converted": "http://a:1", "other": "http://a:2"}, "sglang_arguments": ["--tp", 2]},
            "sglang_arguments is for servers that sglang_python starts",
        ),
    ],
)
def test_contradictions_about_servers_are_refused(drafters, tmp_path, changes, message):
    values = {"engine": "sglang", "target": TARGET, "drafters": drafters, "prompts": {"a": "b"}, "out": tmp_path}
    if not changes:
        values["drafters"] = {}
    with pytest.raises(ValueError, match=message):
        EvaluateConfig(**values | changes)
