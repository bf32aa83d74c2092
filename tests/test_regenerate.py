import shutil
import threading
from pathlib import Path

import pytest

from osprey_jax.command import UserError
from osprey_jax.config import RegenerateConfig
from osprey_jax.decoding import in_process
from osprey_jax.decoding.generate import generate
from osprey_jax.decoding.journal import Journal
from osprey_jax.decoding.requests import Completion, Request
from osprey_jax.decoding.target import Target, open_target
from osprey_jax.regenerate import regenerate
from tests.decoding.fake_server import FakeServer, read, write
from tests.decoding.test_chat import THINKING

GOLDEN = Path(__file__).parent / "golden"
TARGET = GOLDEN / "qwen3/target"

RECORDS = [
    {"id": "b", "conversations": [{"role": "user", "content": "The license"}, {"role": "assistant", "content": "no"}]},
    {
        "id": "a",
        "source": {"kept": True},
        "conversations": [
            {"role": "system", "content": "Be brief"},
            {"role": "user", "content": "all of the work " * 4},
            {"role": "assistant", "content": "an old answer"},
            {"role": "user", "content": "of it"},
        ],
    },
    {"id": "c", "conversations": [{"role": "user", "content": "software"}]},
]


@pytest.fixture
def config(tmp_path):
    write(tmp_path / "in.jsonl", RECORDS)

    def make(without=(), **changes):
        values = {
            "target": TARGET,
            "input": [str(tmp_path / "in.jsonl")],
            "output": tmp_path / "out/x.jsonl",
            "max_new_tokens": 12,
            "batch_size": 2,
        }
        return RegenerateConfig(**{key: value for key, value in (values | changes).items() if key not in without})

    return make


def test_the_target_writes_every_assistant_turn(config):
    """Order and other fields stay; each turn is what the target says to the turns before it, its own included."""
    regenerate(config())
    written = read(config().output)
    assert [record["id"] for record in written] == ["b", "a", "c"]
    assert written[1]["source"] == {"kept": True}
    target = open_target(TARGET, {})
    model = target.load("float32")
    for record, source in zip(written, RECORDS, strict=True):
        messages = record["conversations"]
        asked = [message for message in messages if message["role"] != "assistant"]
        assert asked == [message for message in source["conversations"] if message["role"] != "assistant"]
        assert messages[-1]["role"] == "assistant"
        answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        assert len(answers) == len(record["finish_reasons"])
        for i, reason in zip(answers, record["finish_reasons"], strict=True):
            request = Request(target.prompt_ids(messages[:i]), 12)
            completion = generate(model, [request], stop_ids=target.stop_ids, rows=2)[0]
            assert messages[i]["content"] == target.text(completion.token_ids)
            assert reason == completion.finish_reason
    assert not list(config().output.parent.glob("*.partial"))


def test_servers_and_this_process_write_the_same(config, capsys):
    """The target behind HTTP: equal records, equal prompts to the token, cut where the context cuts."""
    target = open_target(TARGET, {})
    lengths = ("of " * count for count in range(600))
    near = next(t for t in lengths if len(target.prompt_ids([{"role": "user", "content": t}])) >= 500)
    write(Path(config().input[0]), [*RECORDS, {"id": "near", "conversations": [{"role": "user", "content": near}]}])
    model, lock = target.load("float32"), threading.Lock()

    def answer(body):
        prompt = target.prompt_ids(body["messages"])
        with lock:
            completion = generate(model, [Request(prompt, body["max_tokens"])], stop_ids=target.stop_ids, rows=2)[0]
        message = {"role": "assistant", "content": target.text(completion.token_ids)}
        count = len(completion.token_ids)
        return {
            "message": message,
            "finish_reason": completion.finish_reason,
            "tokens": count,
            "prompt_tokens": len(prompt),
        }

    regenerate(config())
    fake = FakeServer(context=target.context)
    fake.answer = answer
    behind = config(output=config().output.with_name("servers.jsonl"), servers=[fake.url], without=["batch_size"])
    regenerate(behind)
    fake.stop()
    assert behind.output.read_text() == config().output.read_text()
    assert len(read(behind.output)) == 4 and len(fake.bodies) == 5
    assert min(body["max_tokens"] for body in fake.bodies) < 12
    assert "another tokenizer" not in capsys.readouterr().err


def test_keys_that_contradict_each_other(config):
    """What is of servers says nothing of a target in this process, and the other way round."""
    for wrong, named in [
        ({"servers": ["http://a:1"]}, "batch_size is of a target in this process"),
        ({"servers": ["http://a:1"], "compute_dtype": "float32"}, "batch_size and compute_dtype"),
        ({"concurrency": 4}, "concurrency is of servers, and none is named"),
        ({"timeout": 4.0}, "timeout is of servers"),
        ({"servers": ["a:1"], "without": ["batch_size"]}, "'a:1' is no base URL"),
        ({"servers": ["http://a:99999"], "without": ["batch_size"]}, "'http://a:99999' is no base URL"),
        ({"servers": ["http://a:x"], "without": ["batch_size"]}, "'http://a:x' is no base URL"),
        ({"servers": ["http://[::1"], "without": ["batch_size"]}, r"'http://\[::1' is no base URL"),
        ({"servers": ["http://a:1", "http://a:1/v1/"], "without": ["batch_size"]}, "http://a:1 is named twice"),
    ]:
        with pytest.raises(ValueError, match=named):
            config(**wrong)
    urls = ["https://a/x/v1", "http://[::1]:30000/"]
    assert config(servers=urls, without=["batch_size"]).servers == ["https://a/x", "http://[::1]:30000"]


def test_a_killed_run_goes_on_where_it_stopped(config, monkeypatch):
    """Nothing finished is done again, a line cut off by the kill is, and the result is that of a run in one go."""
    sampled = {"temperature": 1.0, "top_p": 0.9, "seed": 4}
    whole = config(output=config().output.with_name("whole.jsonl"), **sampled)
    regenerate(whole)
    calls = []

    def counted(model, requests, **options):
        calls.append(len(requests))
        if len(calls) == 2:
            raise KeyboardInterrupt
        return generate(model, requests, **options)

    monkeypatch.setattr(in_process, "generate", counted)
    with pytest.raises(KeyboardInterrupt):
        regenerate(config(**sampled))
    partial = config().output.with_name("x.jsonl.partial")
    lines = partial.read_text().splitlines()
    assert len(lines) == 3  # the header and the first group
    partial.write_text("\n".join([*lines[:2], lines[2][:-9]]))
    regenerate(config(**sampled))
    assert config().output.read_text() == whole.output.read_text()
    calls.clear()
    partial.write_text("\n".join(lines) + "\n")
    config().output.unlink()
    calls += [0, 0]
    regenerate(config(**sampled))
    assert sum(calls) == 2, "only the two turns of the second group were missing"


def test_the_targets_thinking_is_kept_apart(config, tmp_path, monkeypatch):
    """What the model writes around it is the template's; the next turn is asked with it as `reasoning_content`."""
    shutil.copytree(TARGET, tmp_path / "target", ignore=shutil.ignore_patterns("*.safetensors"))
    (tmp_path / "target/chat_template.jinja").write_text(THINKING)
    target = open_target(tmp_path / "target", {})
    text = "<think>\nhm\n</think>\n\nyes<|im_end|>"
    written = Completion(target.tokenizer(text, add_special_tokens=False)["input_ids"], "stop")
    monkeypatch.setattr(Target, "load", lambda *_: None)
    monkeypatch.setattr(in_process, "generate", lambda model, requests, **_: [written] * len(requests))
    regenerate(config(target=tmp_path / "target"))
    answers = [m for record in read(config().output) for m in record["conversations"] if m["role"] == "assistant"]
    assert answers == [{"role": "assistant", "reasoning_content": "hm", "content": "yes"}] * 4


def test_sampling_does_not_depend_on_the_batch(config):
    """A record's random numbers come from the seed, its id and the turn."""
    write(Path(config().input[0]), [*RECORDS, RECORDS[0] | {"id": "d"}])
    outputs = []
    for size in (2, 3):
        made = config(temperature=1.5, top_p=0.9, batch_size=size, output=config().output.with_name(f"{size}.jsonl"))
        regenerate(made)
        outputs.append(read(made.output))
    assert outputs[0] == outputs[1]
    assert outputs[0][0]["conversations"] != outputs[0][3]["conversations"]


def test_other_settings_are_not_mixed_in(config):
    """A partial output of another temperature or target is refused, naming what changed, and left as it is."""
    partial = config().output.with_name("x.jsonl.partial")
    partial.parent.mkdir()
    for text in ("not json\n", "no line", '{"index": 1}\n', '{"settings": {}, "x": \n'):
        partial.write_text(text)
        with pytest.raises(UserError, match="not a partial output"):
            regenerate(config())
        assert partial.read_text() == text
    partial.unlink()
    journal = Journal(partial, {"temperature": 1.0, "seed": 0})
    journal.add({"key": "a"})
    journal.close()
    with pytest.raises(UserError, match="made with another seed, temperature;"):
        Journal(partial, {"temperature": 0.5, "seed": 1})
    with pytest.raises(UserError, match=r"made with another compute_dtype, .*max_new_tokens, .*target"):
        regenerate(config())
    assert len(read(partial)) == 2


def test_an_existing_output_is_left_alone(config):
    config().output.parent.mkdir()
    config().output.write_text("mine")
    with pytest.raises(UserError, match="already exists"):
        regenerate(config())
    assert config().output.read_text() == "mine"


def test_records_without_use_are_listed(config, tmp_path, capsys):
    """Too long for the context, nothing asked, malformed: counted by reason and listed, never silent."""
    long = {"id": "long", "conversations": [{"role": "user", "content": "free software " * 300}]}
    write(tmp_path / "in.jsonl", [long, {"id": "s", "conversations": [{"role": "system", "content": "x"}]}, RECORDS[2]])
    with (tmp_path / "in.jsonl").open("a") as stream:
        stream.write("{broken\n")
    regenerate(config())
    assert [record["id"] for record in read(config().output)] == ["c"]
    rejected = read(config().output.with_name("x.jsonl.rejected"))
    assert [r["reason"] for r in rejected] == [
        "the prompt exceeds the target's context",
        "no user turn",
        "malformed JSON",
    ]
    assert "1 records: malformed JSON" in capsys.readouterr().out


def test_no_usable_record_is_an_error(config, tmp_path):
    write(tmp_path / "in.jsonl", [{"id": "x"}])
    with pytest.raises(UserError, match="no usable conversation"):
        regenerate(config())
    assert not list(config().output.parent.iterdir())


def test_a_turn_past_the_context_is_left_out(config, tmp_path):
    """The conversation ends with the last answer that fits, and says how many user turns it lost."""
    turns = [{"role": "user", "content": "of it"}, {"role": "user", "content": "free software " * 300}]
    beside = {"id": "y", "conversations": [turns[0]] * 3}  # goes on in the same batch
    write(tmp_path / "in.jsonl", [{"id": "x", "conversations": [*turns, turns[0]]}, beside])
    regenerate(config())
    record, other = read(config().output)
    assert len(other["conversations"]) == 6 and "unanswered" not in other
    assert [message["role"] for message in record["conversations"]] == ["user", "assistant"]
    assert record["unanswered"] == 2
