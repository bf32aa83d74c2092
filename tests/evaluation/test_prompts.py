import json
import shutil

import pytest

from osprey_jax.config import EvaluateConfig
from osprey_jax.decoding.target import open_target
from osprey_jax.evaluation.prompts import fingerprint, next_turns, read_prompt_set
from tests.conftest import GOLDEN

TARGET = GOLDEN / "qwen3/target"


@pytest.fixture
def read(tmp_path):
    """The prompt set of some records."""

    def call(records, target=TARGET, **changes):
        path = tmp_path / "prompts.jsonl"
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
        config = EvaluateConfig(target=target, drafters={"d": "d"}, prompts={"p": path}, out="out", **changes)
        return read_prompt_set("p", path, config, open_target(target, {})), config

    return call


def conversation(name, *texts, **more):
    roles = ("user", "assistant")
    turns = [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]
    return {"id": name, "conversations": turns} | more


def test_what_precedes_the_first_answer_is_asked(read):
    """An answer in the file is another model's."""
    prompts, _ = read([conversation("a", "free", "as in speech", "and then")])
    wanted = open_target(TARGET, {}).prompt_ids([{"role": "user", "content": "free"}])
    assert prompts.items[0].request.prompt == wanted and not prompts.later_turns


def test_tools_are_part_of_the_prompt(read, tmp_path):
    """What serving shows to the model is measured with it."""
    copy = tmp_path / "target"
    shutil.copytree(TARGET, copy)
    template = copy / "chat_template.jinja"
    template.write_text("{{ tools | tojson }}" + template.read_text())
    tools = [{"type": "function", "function": {"name": "f"}}]
    prompts, _ = read([conversation("a", "free", tools=tools)], target=copy)
    text = open_target(copy, {}).tokenizer.decode(prompts.items[0].request.prompt)
    assert text.startswith('[{"type"')


def test_a_sample_is_drawn_by_seed(read):
    """The same seed draws the same prompts, in file order; another draws others; never just the first."""
    records = [conversation(f"r{i}", f"of {i}") for i in range(40)]

    def drawn(**changes):
        return [item.questions.id for item in read(records, **changes)[0].items]

    assert drawn(sample=5) == drawn(sample=5) == sorted(drawn(sample=5), key=lambda name: int(name[1:]))
    assert len(set(drawn(sample=5))) == 5 and drawn(sample=5) != [f"r{i}" for i in range(5)]
    assert drawn(sample=5) != drawn(sample=5, seed=1)
    assert len(drawn(sample=99)) == len(drawn()) == 40


def test_ids_given_twice_are_told_apart(read):
    """Arms are compared by them."""
    prompts, _ = read([conversation("a", "free"), conversation("b", "of"), conversation("a", "to")])
    assert [item.questions.id for item in prompts.items] == ["a", "b", "a#2"]


def test_an_id_like_one_made_up(read):
    """Two requests of one name would end the evaluation after it measured everything."""
    prompts, _ = read([conversation(name, "free") for name in ("x", "x", "x#2", "x#2", "x")])
    assert [item.questions.id for item in prompts.items] == ["x", "x#2", "x#2#2", "x#2#3", "x#3"]


def test_a_turn_follows_what_was_written(read):
    """With the answer in its history; where there is none, it is said."""
    prompts, config = read([{"question_id": i, "turns": ["free", "why", "and"]} for i in range(2)])
    assert prompts.later_turns
    chat = open_target(TARGET, {})
    [second] = next_turns(prompts, prompts.items, ["as in speech", None], config, chat)
    messages = [
        {"role": "user", "content": "free"},
        {"role": "assistant", "content": "as in speech"},
        {"role": "user", "content": "why"},
    ]
    assert second.request.prompt == chat.prompt_ids(messages)
    assert second.name == {"id": "0", "turn": 1}
    assert [(rejection.id, rejection.reason) for rejection in prompts.skipped] == [("1", "turn 0 was not answered")]
    [third] = next_turns(prompts, [second], ["because"], config, chat)
    assert third.turn == 2 and len(third.messages) == 5
    assert next_turns(prompts, [third], ["."], config, chat) == []


def test_a_fingerprint_is_of_what_is_asked(read):
    """Any other prompt, name or limit is another set."""
    made = fingerprint(read([conversation("a", "free")])[0].items)
    assert made == fingerprint(read([conversation("a", "free", "an answer")])[0].items)
    others = [
        read([conversation("b", "free")]),
        read([conversation("a", "freed")]),
        read([conversation("a", "free")], max_new_tokens=7),
    ]
    assert made not in [fingerprint(prompts.items) for prompts, _ in others]
