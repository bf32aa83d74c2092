import csv
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from osprey_jax import evaluate as module
from osprey_jax.command import UserError
from osprey_jax.config import EvaluateConfig
from osprey_jax.decoding.generate import generate
from osprey_jax.decoding.requests import Request
from osprey_jax.decoding.speculate import speculate
from osprey_jax.decoding.target import open_target
from osprey_jax.evaluate import evaluate
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
    pairs = [(result["drafter"], result["prompts"]) for result in found["results"]]
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
        assert r["equals_target"]
    assert code["accepted_length"] == np.mean([r["accepted_length"] for r in code["requests"]])
    assert len(table(config(), "requests.csv")) == 10
    assert [row["accepted_length"] for row in table(config(), "summary.csv")] == [
        str(result["accepted_length"]) for result in found["results"]
    ]
    assert (config().out / "accepted_length.png").read_bytes().startswith(b"\x89PNG")
    assert f"{code['accepted_length']:.3f}" in capsys.readouterr().out
    assert found["config"]["max_new_tokens"] == 20 and set(found["versions"]) >= {"jax", "flax", "osprey_jax"}


def test_mean_over_requests_is_not_the_ratio_of_sums():
    """Both are given, each under its name; a request without a verification is in neither, and is counted."""
    request = {"equals_target": True, "finish_reason": "stop", "histogram": [1, 0]}
    facts = [(10, 2, 5.0), (10, 10, 1.0), (1, 0, None)]
    requests = [request | {"completion_tokens": t, "verifications": v, "accepted_length": a} for t, v, a in facts]
    requests[0]["equals_target"] = False
    summary = module._summary({"drafter": "d", "prompts": "p", "requests": requests})
    assert (summary["accepted_length"], summary["tokens_per_verification"]) == (3.0, 20 / 12)
    assert (summary["without_verification"], summary["differing"]) == (1, 1)
    assert (summary["completion_tokens"], summary["verifications"], summary["histogram"]) == (21, 12, [3, 0])


def test_text_is_compared_with_the_targets_own(config, monkeypatch):
    """A decoder that changed the text would be reported, request by request."""

    def off_by_one(model, requests, **options):
        completions = generate(model, requests, **options)
        completions[0].token_ids[-1] += 1
        return completions

    monkeypatch.setattr(module, "generate", off_by_one)
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

    monkeypatch.setattr(module, "speculate", counted)
    with pytest.raises(KeyboardInterrupt):
        evaluate(config(batch_size=3))
    evaluate(config(batch_size=3))
    assert len(calls) == 3 + 2, "two of four parts were done before the interrupt"
    whole = results(config())["results"]
    monkeypatch.setattr(module, "generate", None)  # the target's own text is kept too
    evaluate(config(batch_size=2))
    assert len(calls) == 5 and results(config())["results"] == whole
    evaluate(config(batch_size=3, draft_steps=2))
    assert len(calls) == 9 and set(calls[5:]) == {2}


def test_changed_files_are_measured_again(config, drafters, tmp_path, monkeypatch):
    """A part belongs to its weights and prompts, whatever their names."""
    calls = []

    def counted(*arguments, **options):
        calls.append(1)
        return speculate(*arguments, **options)

    monkeypatch.setattr(module, "speculate", counted)
    drafter = tmp_path / "mine"
    shutil.copytree(drafters["converted"], drafter)
    made = config(drafters={"mine": drafter}, prompts={"prose": config().prompts["prose"]})
    evaluate(made)
    shutil.copy(drafters["other"] / "model.safetensors", drafter)
    evaluate(made)
    write(made.prompts["prose"], PROSE[:1])
    evaluate(made)
    assert len(calls) == 3
    assert not (made.out / "accepted_length.png").exists()


def test_only_the_first_turns_are_asked(config):
    """What precedes the first assistant turn is the prompt."""
    made = config()
    prompts = module._read_prompts("prose", made.prompts["prose"], made, open_target(TARGET, {}), "")
    target = open_target(TARGET, {})
    assert prompts.requests[1].prompt == target.prompt_ids(PROSE[1]["conversations"][:1])


def test_tools_are_part_of_the_prompt(config, tmp_path):
    """What serving shows to the model is measured with it."""
    copy = tmp_path / "target"
    shutil.copytree(TARGET, copy)
    template = copy / "chat_template.jinja"
    template.write_text("{{ tools | tojson }}" + template.read_text())
    tools, made, target = [{"type": "function", "function": {"name": "f"}}], config(), open_target(copy, {})
    write(made.prompts["prose"], [PROSE[1] | {"tools": tools}])
    [request] = module._read_prompts("prose", made.prompts["prose"], made, target, "").requests
    assert request.prompt == target.prompt_ids(PROSE[1]["conversations"][:1], tools)
    assert target.tokenizer.decode(request.prompt).startswith('[{"type"')


def test_a_sample_is_drawn_by_seed(config):
    """The same seed draws the same prompts, in file order; another draws others."""
    write(config().prompts["code"], [conversation(f"r{i}", f"of {i}") for i in range(40)])

    def drawn(**changes):
        made = config(**changes)
        return module._read_prompts("code", made.prompts["code"], made, open_target(TARGET, {}), "").ids

    assert drawn(sample=5) == drawn(sample=5) == sorted(drawn(sample=5), key=lambda name: int(name[1:]))
    assert len(set(drawn(sample=5))) == 5
    assert drawn(sample=5) != drawn(sample=5, seed=1)
    assert len(drawn(sample=99)) == len(drawn()) == 40


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


def test_names_that_are_no_file_names(config, drafters):
    """They name the parts; one with a slash would leave the directory."""
    with pytest.raises(UserError, match="is named with"):
        evaluate(config(drafters={"../x": drafters["other"]}))
    with pytest.raises(UserError, match="nothing to evaluate"):
        evaluate(config(drafters={}))
