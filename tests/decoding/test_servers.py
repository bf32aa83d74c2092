"""What servers are asked and what is made of their answers, through the command: real HTTP."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

from osprey_jax.decoding.endpoint import Endpoint
from osprey_jax.regenerate import regenerate
from tests.decoding.fake_server import RECORDS, TARGET, answered, echo, read, write
from tests.decoding.test_chat import THINKING


def with_template(tmp_path, template):
    """The target's tokenizer with another template."""
    shutil.copytree(TARGET, tmp_path / "target", ignore=shutil.ignore_patterns("*.safetensors"))
    (tmp_path / "target/chat_template.jinja").write_text(template)
    return tmp_path / "target"


def test_no_more_at_a_time_than_allowed(start, config):
    """Each server is kept busy, with at most `concurrency` requests."""
    fakes = [start(), start()]
    for fake in fakes:
        fake.delay = 0.05
    regenerate(config(*fakes))
    assert [fake.most for fake in fakes] == [3, 3]
    first = {body["messages"][0]["content"] for fake in fakes for body in fake.bodies[:3]}
    assert first == {f"question {i}.0" for i in range(6)}, "in the input's order"


def test_what_is_asked(start, config, tmp_path):
    """A turn's seed is its own; nothing is left to the model's generation_config; the history holds all answers."""
    write(tmp_path / "reversed.jsonl", RECORDS[::-1])
    seeds = []
    for name, changes in [("in", {}), ("reversed", {}), ("in", {"seed": 1})]:
        fake = start()
        more = {"temperature": 0.7, "top_p": 0.9} | changes
        regenerate(
            config(fake, input=[str(tmp_path / f"{name}.jsonl")], output=tmp_path / f"{len(seeds)}.jsonl", **more)
        )
        seeds.append({json.dumps(body["messages"]): body["seed"] for body in fake.bodies})
        for body in fake.bodies:
            assert (body["model"], body["max_tokens"], body["temperature"], body["top_p"]) == ("golden", 16, 0.7, 0.9)
            assert (body["top_k"], body["min_p"], body["repetition_penalty"]) == (-1, 0, 1)
            assert "chat_template_kwargs" not in body
    assert seeds[0] == seeds[1]
    assert not set(seeds[0].values()) & set(seeds[2].values())
    assert len(set(seeds[0].values())) == len(seeds[0]) == sum(len(record["conversations"]) for record in RECORDS)


def test_a_conversation_stays_where_it_is_cached(start, config):
    """The next turn goes to the server that answered the last."""
    fakes = [start(), start()]
    for fake in fakes:
        fake.delay = 0.02
    regenerate(config(*fakes))
    first, second = ({body["messages"][0]["content"] for body in fake.bodies} for fake in fakes)
    assert first and second and not first & second


def test_key(monkeypatch):
    """A server that wants one gets it from where such clients take it; nothing is sent unasked."""
    assert "Authorization" not in Endpoint("http://a", 1.0).client.headers
    monkeypatch.setenv("OPENAI_API_KEY", "k")
    assert Endpoint("http://a", 1.0).client.headers["Authorization"] == "Bearer k"


def test_template_options_reach_the_server(start, config, tmp_path):
    target = with_template(tmp_path, "{% if loud %}!{% endif %}" + (TARGET / "chat_template.jinja").read_text())
    fake = start()
    regenerate(config(fake, target=target, template_options={"loud": True}))
    assert all(body["chat_template_kwargs"] == {"loud": True} for body in fake.bodies)


def test_reasoning_is_kept_apart(start, config, tmp_path):
    """With the server's parser and without, a record has the same thinking; the history that is asked holds it."""
    target = with_template(tmp_path, THINKING)
    separated = {"role": "assistant", "reasoning_content": "\nhm\n", "content": "\n\nyes"}
    whole = {"role": "assistant", "content": "<think>\nhm\n</think>\n\nyes"}
    for message in (separated, whole):
        fake = start()
        fake.answer = lambda body, message=message: {"message": message, "finish_reason": "stop", "tokens": 3}
        made = config(fake, target=target)
        regenerate(made)
        answer = {"role": "assistant", "reasoning_content": "hm", "content": "yes"}
        for record, source in zip(read(made.output), RECORDS, strict=True):
            assert record["conversations"] == [part for turn in source["conversations"] for part in (turn, answer)]
        assert all(set(map(len, body["messages"][1::2])) <= {3} for body in fake.bodies)
        assert {len(body["messages"]) for body in fake.bodies} == {1, 3, 5}
        made.output.unlink()


def test_an_answer_cut_in_its_thinking(start, config):
    """There may be no content at all."""
    fake = start()
    message = {"role": "assistant", "reasoning_content": "hm", "content": None}
    fake.answer = lambda body: {"message": message, "finish_reason": "length", "tokens": 16}
    regenerate(config(fake))
    assert read(config(fake).output)[0]["conversations"][1] == message | {"content": ""}


def test_too_long_for_the_context(start, config, tmp_path):
    """The server's context counts: a prompt beyond it is not asked, near its end fewer tokens are."""
    texts = {"long": "x" * 60, "near": "x" * 20, "short": "x"}
    write(
        tmp_path / "in.jsonl", [{"id": n, "conversations": [{"role": "user", "content": t}]} for n, t in texts.items()]
    )
    fake = start(context=48)
    regenerate(config(fake))
    asked = {body["messages"][0]["content"]: body["max_tokens"] for body in fake.bodies}
    assert texts["long"] not in asked and 0 < asked[texts["near"]] < 16 == asked["x"]
    [rejected] = read(tmp_path / "out.jsonl.rejected")
    assert (rejected["id"], rejected["reason"]) == ("long", "the prompt exceeds the target's context")
    fake = start(context=None)
    with_context = config(fake, output=tmp_path / "other.jsonl")
    regenerate(with_context)
    assert len(read(with_context.output)) == 3, "the config's context, where the server tells none"


def test_prompts_of_another_length_are_reported(start, config, capsys):
    """Once: the server renders or tokenizes prompts in another way than training will."""
    for number, warnings in [(1, 1), (17, 0)]:
        fake = start()
        fake.answer = lambda body, number=number: echo(body) | {"prompt_tokens": number}
        records = [{"id": "x", "conversations": [{"role": "user", "content": "software"}]}] * 3
        made = config(fake, output=config(fake).output.with_name(f"{number}.jsonl"))
        write(Path(made.input[0]), records)
        regenerate(made)
        assert capsys.readouterr().err.count("another tokenizer or chat template") == warnings


def test_no_jax_where_servers_answer(start, config, tmp_path):
    """It takes seconds to import, and a machine that only asks may not have it."""
    made = config(start())
    code = (
        "import sys; from osprey_jax.config import RegenerateConfig; from osprey_jax.regenerate import regenerate; "
        f"regenerate(RegenerateConfig.model_validate_json({made.model_dump_json(exclude_defaults=True)!r})); "
        "assert not {'jax', 'flax', 'torch'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, timeout=60)
    assert read(made.output) == answered()
