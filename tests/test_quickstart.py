"""The quickstart's texts, tokenizers and configs, without its training."""

import importlib.util
import json
import os
import random
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from osprey_jax.command import UserError
from osprey_jax.config import EvaluateConfig, RegenerateConfig, TrainConfig, load_config
from osprey_jax.data.recipes import TextRecipe
from osprey_jax.data.records import read_blocks
from osprey_jax.data.tokenizer import check_tokenizer, load_tokenizer
from osprey_jax.models.hf_config import check_tap_layers, transformer_config
from osprey_jax.reports.costs import DecisionConfig
from tests.data.rendering import assistant_spans

ROOT = Path(__file__).resolve().parent.parent
CONFIGS = ROOT / "configs"
QUICKSTART = CONFIGS / "quickstart"
KINDS = {
    "osprey_jax.train": TrainConfig,
    "osprey_jax.regenerate": RegenerateConfig,
    "osprey_jax.evaluate": EvaluateConfig,
}


def load(name: str):
    """A script of the quickstart as a module."""
    spec = importlib.util.spec_from_file_location(f"quickstart_{name}", QUICKSTART / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


texts, driver = load("texts"), load("run")


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> Path:
    """What the first stage writes."""
    out = tmp_path_factory.mktemp("quickstart") / "inputs"
    texts.write_inputs(out)
    return out


@pytest.fixture(scope="module")
def documents():
    return texts.read_texts()


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


# ---- texts


def test_inputs_are_the_same_every_time(inputs, tmp_path):
    """Resuming relies on it: runs are tied to the bytes that they were trained on. Another process hashes otherwise."""
    subprocess.run([sys.executable, QUICKSTART / "texts.py", tmp_path / "again"], cwd=ROOT, check=True)
    files = sorted(path.relative_to(inputs) for path in inputs.rglob("*") if path.is_file())
    assert len(files) == 12
    for file in files:
        assert (inputs / file).read_bytes() == (tmp_path / "again" / file).read_bytes(), file


def test_no_held_out_document_is_trained_on(documents):
    """Accepted length on held-out prompts would mean nothing otherwise."""
    for split in documents.values():
        assert split["train"] and split["held_out"]
        assert not set(split["train"]) & set(split["held_out"])


def test_held_out_prompts_come_from_held_out_documents(inputs, documents):
    """The split must reach the files that the evaluation reads."""
    for domain in ("code", "prose"):
        held_out = "\0".join(documents[domain]["held_out"])
        prompts = lines(inputs / "prompts" / f"{domain}.held_out.jsonl")
        assert len({prompt["id"] for prompt in prompts}) == texts.HELD_OUT_PROMPTS
        for prompt in prompts:
            (turn,) = prompt["conversations"]
            assert turn["role"] == "user" and turn["content"] in held_out


def test_code_has_no_prose_in_it():
    """Comments and docstrings would blur the shift from one domain to the other."""
    source = '"""Module."""\nclass A:\n    """Class."""\n\ndef f(x):\n    "Function."  # comment\n    return x + 1\n'
    assert texts.bare_code(source) == "class A:\n    pass\n\ndef f(x):\n    return x + 1\n"
    assert texts.bare_code("def f(:").strip() == ""


def test_prose_without_pydoc_data_is_docstrings(monkeypatch):
    """Some distributions leave `pydoc_data` out."""
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", None)
    source = f'"""{"Long. " * 40}"""\ndef f():\n    """Short."""\n    return 1\n'
    monkeypatch.setattr(texts, "_sources", lambda: iter([("a.py", source), ("b.py", "x = 1")]))
    assert list(texts._prose()) == [("a.py", "Long. " * 40 + "\n")]


def test_windows_follow_each_other_and_leave_the_space_to_the_answer():
    """A byte-level tokenizer writes a space at a word's beginning: ending a question, it would be an odd token."""
    document = "first\n" + "".join(f"word{i} " for i in range(200))
    ((question, answer),) = texts.draw_windows([document], 1, random.Random(0))
    assert document.startswith("first\n" + question + answer)
    assert not question[-1].isspace() and answer[0].isspace()
    with pytest.raises(UserError, match="gives only 1 of 2 pieces"):
        texts.draw_windows([document], 2, random.Random(0))


# ---- tokenizers and chats


@pytest.mark.parametrize("model", ["target", "small_lm"])
def test_tokenizer_fits_its_model_and_loses_nothing(inputs, model):
    """Byte-level: any text comes back, spaces included; and its ids are those that the config names."""
    tokenizer, config = load_tokenizer(inputs / "tokenizers" / model), QUICKSTART / model / "config.json"
    check_tokenizer(tokenizer, transformer_config(config).vocab_size, model)
    assert len(tokenizer) == transformer_config(config).vocab_size
    raw = json.loads(config.read_text())
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id) == (raw["eos_token_id"], raw["pad_token_id"])
    text = (QUICKSTART / "texts.py").read_text(encoding="utf-8") + "\n  é ▁ \t<|other|> \n"
    assert tokenizer.decode(tokenizer(text, add_special_tokens=False)["input_ids"]) == text


def test_tokenizers_differ(inputs):
    """Aligning two vocabularies is part of what the quickstart shows."""
    target, small_lm = (set(load_tokenizer(inputs / "tokenizers" / m).get_vocab()) for m in ("target", "small_lm"))
    assert target - small_lm and small_lm - target


def test_chat_template_shows_its_assistant_turns(inputs):
    """Distillation teaches the spans alone: what the target writes, its end token included."""
    tokenizer = load_tokenizer(inputs / "tokenizers" / "target")
    messages = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": " q\n"},
        {"role": "assistant", "content": "\n a "},
        {"role": "user", "content": "r"},
        {"role": "assistant", "content": "b"},
    ]
    text, spans = assistant_spans(tokenizer, messages)
    assert [text[start:end] for start, end in spans] == ["\n a <|end|>", "b<|end|>"]
    asked = tokenizer.apply_chat_template(messages[:2], tokenize=False, add_generation_prompt=True)
    assert text.startswith(asked) and len(asked) == spans[0][0]


def test_target_learns_what_its_template_writes(inputs):
    """A training document and its end token are a rendered conversation, token for token: chats are in distribution."""
    tokenizer = load_tokenizer(inputs / "tokenizers" / "target")
    make_rows, _ = TextRecipe(inputs / "tokenizers" / "target", 256).open()
    row = make_rows(list(read_blocks([inputs / "text" / "chats.held_out.jsonl"], 10_000))).rows[0]
    first = row.token_ids[: row.segment_lengths[0]]
    user, end, assistant = (tokenizer.convert_tokens_to_ids(t) for t in ("<|user|>", "<|end|>", "<|assistant|>"))
    special = [int(token) for token in first if token <= tokenizer.convert_tokens_to_ids("<|tool|>")]
    assert special == [user, end, assistant, end] and (first[0], first[-1]) == (user, end)


def test_target_has_default_tap_layers():
    """Fewer than 7 layers have none."""
    assert check_tap_layers(None, transformer_config(QUICKSTART / "target" / "config.json").num_layers)


# ---- configs and driver


@pytest.mark.parametrize("path", sorted(CONFIGS.rglob("*.yaml")), ids=lambda path: str(path.relative_to(CONFIGS)))
def test_config_starts_with_its_command_and_is_valid(path):
    """Its first lines are what a reader pastes, the last of them with this very file."""
    commands = path.read_text(encoding="utf-8").split("\n#\n")[0].splitlines()
    assert all(command.startswith("# python -m osprey_jax.") for command in commands)
    _, _, _, module, *_, option, config = commands[-1].split()
    assert ROOT / config == path
    load_config(path, [], DecisionConfig if option == "--decide" else KINDS[module])


def test_another_output_directory_moves_every_path(tmp_path):
    """One path left behind would mix two runs."""
    for stage in driver.stages(str(tmp_path)):
        assert stage.output.is_relative_to(tmp_path)
        for arguments in stage.commands:
            moved = " ".join(arguments[arguments.index("--config") + 2 :] if "--config" in arguments else arguments)
            assert driver.DEFAULT_OUT not in moved
            if "--config" in arguments:
                at = arguments.index("--config")
                config = load_config(ROOT / arguments[at + 1], arguments[at + 2 :], KINDS[arguments[1]])
                assert driver.DEFAULT_OUT not in config.model_dump_json()


def test_default_output_directory_needs_no_override():
    """The quickstart runs the configs as they stand."""
    for path in QUICKSTART.glob("*.yaml"):
        assert driver.overrides(yaml.safe_load(path.read_text()), driver.DEFAULT_OUT) == []


def test_stages_run_once_in_order(tmp_path, capfd):
    """A second call only goes on: what is complete is not made again."""
    write = "import sys, pathlib; pathlib.Path(sys.argv[1]).write_text('made')"
    plan = [driver.Stage(name, tmp_path / name, [["-c", write, str(tmp_path / name)]]) for name in ("one", "two")]
    driver.run_stages(plan, {})
    (tmp_path / "one").write_text("kept")
    (tmp_path / "two").unlink()
    driver.run_stages(plan, {})
    assert ((tmp_path / "one").read_text(), (tmp_path / "two").read_text()) == ("kept", "made")


@pytest.mark.parametrize("code, said", [("raise SystemExit(3)", "failed"), ("pass", "left no")])
def test_failed_stage_ends_the_run(tmp_path, code, said):
    """Later stages would work on something else."""
    with pytest.raises(UserError, match=rf"stage 1 \(one\) {said}"):
        driver.run_stages([driver.Stage("one", tmp_path / "one", [["-c", code]])], {})


def test_signal_reaches_the_command_and_ends_the_run(tmp_path):
    """`train` saves on a signal and exits 0: that must not pass for a complete stage, nor start the next command."""
    stop = "import os, signal; signal.signal(2, lambda *_: os._exit(0)); os.kill(os.getppid(), 15); signal.pause()"
    never = f"import pathlib; pathlib.Path({str(tmp_path / 'one')!r}).touch()"
    with pytest.raises(KeyboardInterrupt):
        driver.run_stages([driver.Stage("one", tmp_path / "one", [["-c", stop], ["-c", never]])], {})
    assert not (tmp_path / "one").exists()


def test_changed_configs_are_refused(tmp_path, monkeypatch):
    """Stages that are complete would silently be those of the old configs."""
    out = tmp_path / "out"
    driver.check_same_configs(out)
    driver.check_same_configs(out)
    record = json.loads((out / "configs.json").read_text())
    (out / "configs.json").write_text(json.dumps(record | {"configs/quickstart/osprey.yaml": "other"}))
    with pytest.raises(UserError, match=r"before configs/quickstart/osprey\.yaml changed"):
        driver.check_same_configs(out)
    with pytest.raises(UserError, match="holds something that is not a quickstart"):
        driver.check_same_configs(Path(__file__).parent)


@pytest.mark.slow
def test_whole_quickstart_with_few_steps(tmp_path):
    """From nothing to the table, through an interrupt, by the public commands; a second call only prints it again."""
    folder = tmp_path / "configs" / "quickstart"
    shutil.copytree(QUICKSTART, folder)
    for path in folder.glob("*.yaml"):
        fewer = {"steps": 3, "max_new_tokens": 6}
        values = yaml.safe_load(path.read_text())
        path.write_text(yaml.safe_dump(values | {key: fewer[key] for key in fewer.keys() & values.keys()}))
    command = [sys.executable, folder / "run.py", "--out", tmp_path / "out"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}

    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        while "osprey_jax.train" not in process.stdout.readline():
            pass
        process.send_signal(signal.SIGTERM)
        process.stdout.read()
    assert process.returncode == 130

    first, second = (subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True) for _ in range(2))
    assert (first.returncode, second.returncode) == (0, 0)
    assert "$ python" not in second.stdout
    table = second.stdout[second.stdout.index("Accepted length") :]
    assert table in first.stdout and all(text in table for text in driver.DRAFTERS.values())
    results = json.loads((tmp_path / "out" / "evaluation" / "results.json").read_text())["results"]
    assert len(results) == 2 * len(driver.DRAFTERS) and not any(result["differing"] for result in results)
    assert (tmp_path / "out" / "evaluation" / "accepted_length.png").is_file()
    left = {path.name for path in tmp_path.rglob("*.tmp")}
    assert not left
