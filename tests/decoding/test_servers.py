"""The pool, through the command: real HTTP, faults injected."""

import json
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from osprey_jax.command import UserError
from osprey_jax.config import RegenerateConfig
from osprey_jax.decoding import endpoint, pool
from osprey_jax.decoding.endpoint import Endpoint
from osprey_jax.regenerate import regenerate
from tests.decoding.fake_server import RECORDS, FakeServer, answered, echo, read, write
from tests.decoding.test_chat import THINKING

TARGET = Path(__file__).parents[1] / "golden/qwen3/target"


def with_template(tmp_path, template):
    """The target's tokenizer with another template."""
    shutil.copytree(TARGET, tmp_path / "target", ignore=shutil.ignore_patterns("*.safetensors"))
    (tmp_path / "target/chat_template.jinja").write_text(template)
    return tmp_path / "target"


@pytest.fixture(autouse=True)
def fast(monkeypatch):
    monkeypatch.setattr(endpoint, "FIRST_DELAY_S", 0.01)
    monkeypatch.setattr(endpoint, "LONGEST_DELAY_S", 0.05)
    monkeypatch.setattr(endpoint, "PATIENCE_S", 2.0)


@pytest.fixture
def start():
    """`start(...) -> FakeServer`, stopped after the test."""
    started = []

    def make(*arguments, **options):
        started.append(FakeServer(*arguments, **options))
        return started[-1]

    yield make
    for server in started:
        server.stop()


@pytest.fixture
def config(tmp_path):
    write(tmp_path / "in.jsonl", RECORDS)

    def make(*fakes, **changes):
        values = {
            "target": TARGET,
            "servers": [fake.url for fake in fakes],
            "input": [str(tmp_path / "in.jsonl")],
            "output": tmp_path / "out.jsonl",
            "max_new_tokens": 16,
            "concurrency": 3,
            "timeout": 5.0,
        }
        return RegenerateConfig(**values | changes)

    return make


FAULTS = [
    "reset",
    "cut",
    "garbage",
    "truncated",
    "empty",
    "null",
    "number",
    "abort",
    "surrogate",
    "busy",
    500,
    503,
    408,
]


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_costs_nothing(fault, start, config):
    """Whatever comes instead of an answer is asked again, and the output is that of an undisturbed run."""
    fake = start()
    fake.fault = lambda number, body: fault if number % 3 == 1 else None
    regenerate(config(fake))
    assert read(config(fake).output) == answered()
    assert not config(fake).output.with_name("out.jsonl.rejected").exists()


def test_a_server_that_hangs(start, config):
    """Its requests go to the other after the time that an answer may take."""
    hanging, sound = start(), start()
    hanging.fault = lambda number, body: "hang"
    regenerate(config(hanging, sound, timeout=0.3))
    assert read(config(sound).output) == answered()


def test_a_conversation_goes_elsewhere(start, config):
    """What fails on one server is asked of another."""
    failing, sound = start(), start()
    sound.delay = 0.1  # so that the other has free places
    failing.fault = lambda number, body: (
        500 if body["messages"][0]["content"] in ("question 3.0", "question 6.0") else None
    )
    regenerate(config(failing, sound))
    assert read(config(sound).output) == answered()
    asked = [body["messages"][0]["content"] for body in failing.bodies]
    assert max(asked.count("question 3.0"), asked.count("question 6.0")) == 1


def test_what_a_server_had_does_not_keep_it_out(start, config):
    """Requests that hang from before it was out are no part of what it can do when it is back."""
    fake = start()
    times = []

    def fault(number, body):
        times.append(time.monotonic())
        return "hang" if number < 2 else 401 if number == 2 else None

    fake.fault = fault
    regenerate(config(fake, timeout=2.0))
    assert read(config(fake).output) == answered()
    assert times[9] - times[0] < 1.5


def test_a_dead_server_is_taken_out_and_taken_back(start, config, capsys):
    """Its conversations go to the other; it is asked again until it answers, and then has its share."""
    dying, other, back = start(), start(), threading.Event()
    other.delay = 0.03

    def restart():
        dying.stop()
        time.sleep(0.2)
        back.set()
        dying.start()

    def fault(number, body):
        if number == 2:
            threading.Thread(target=restart).start()
        return "reset" if number >= 2 and not back.is_set() else None

    dying.fault = fault
    records = [{"id": str(i), "conversations": RECORDS[2]["conversations"]} for i in range(60)]
    write(Path(config(other).input[0]), records)
    regenerate(config(dying, other))
    assert read(config(other).output) == answered(records)
    said = capsys.readouterr().err
    assert f"{dying.url}: out (" in said and f"{dying.url}: in again" in said
    assert len(dying.bodies) > 30
    assert other.most <= 3, "what it takes over is no reason to have more at a time"


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
    assert "Authorization" not in Endpoint("http://a", 1.0)._client.headers
    monkeypatch.setenv("OPENAI_API_KEY", "k")
    assert Endpoint("http://a", 1.0)._client.headers["Authorization"] == "Bearer k"


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


# ---- failures


def test_a_refused_conversation_is_listed(start, config, tmp_path, monkeypatch):
    """A 400 is the conversation's own: not asked again; answers before it are kept; all others are answered."""
    monkeypatch.setattr(pool, "_REFUSALS", 2)
    fake = start()
    refused = {"question 3.0", "question 5.2"}
    fake.fault = lambda number, body: 400 if body["messages"][-1]["content"] in refused else None
    regenerate(config(fake))
    wanted = answered()
    cut = wanted[5] | {
        "conversations": wanted[5]["conversations"][:4],
        "finish_reasons": wanted[5]["finish_reasons"][:2],
    }
    assert read(config(fake).output) == [*wanted[:3], wanted[4], cut | {"unanswered": 1}, *wanted[6:]]
    rejected = read(tmp_path / "out.jsonl.rejected")
    assert [line["id"] for line in rejected] == ["r3", "r5"]
    assert {line["reason"] for line in rejected} == {"refused by the server: 400 Bad Request: fault 400"}
    assert rejected[0]["where"].endswith("in.jsonl:4")
    asked = [body["messages"][-1]["content"] for body in fake.bodies]
    assert all(asked.count(content) == 1 for content in refused)


def test_a_failure_that_may_pass_is_asked_once_more(start, config, tmp_path):
    """The run ends without an output and says so; the next one asks what failed, and ends in any case."""
    fake = start()
    failing = {"question 1.1", "question 4.0"}
    fake.fault = lambda number, body: 500 if body["messages"][-1]["content"] in failing else None
    with pytest.raises(UserError, match=r"^2 conversations failed for reasons that may pass, listed in .*rejected"):
        regenerate(config(fake))
    assert not config(fake).output.exists()
    reasons = {line["id"]: line["reason"] for line in read(tmp_path / "out.jsonl.rejected")}
    assert reasons.keys() == {"r1", "r4"}
    assert all(
        r.startswith("8 tries failed, the last with 500 Internal Server Error: fault 500") for r in reasons.values()
    )
    assert [body["messages"][-1]["content"] for body in fake.bodies].count("question 4.0") == 8
    asked = sum(body["max_tokens"] == 16 for body in fake.bodies)  # others try the server
    failing.remove("question 1.1")
    regenerate(config(fake))
    assert read(config(fake).output) == [record for record in answered() if record["id"] != "r4"]
    assert [line["id"] for line in read(tmp_path / "out.jsonl.rejected")] == ["r4"]
    assert sum(body["max_tokens"] == 16 for body in fake.bodies) == asked + 2 + 8
    assert not (tmp_path / "out.jsonl.partial").exists()


def test_what_was_answered_before_a_failure(start, config, tmp_path):
    """Is kept when the turn fails again, as it is where the turn is refused."""
    fake = start()
    fake.fault = lambda number, body: 500 if body["messages"][-1]["content"] == "question 5.2" else None
    with pytest.raises(UserError, match=r"^1 conversations failed"):
        regenerate(config(fake))
    regenerate(config(fake))
    wanted = answered()
    wanted[5]["conversations"] = wanted[5]["conversations"][:4]
    wanted[5] |= {"finish_reasons": wanted[5]["finish_reasons"][:2], "unanswered": 1}
    assert read(config(fake).output) == wanted
    assert [line["id"] for line in read(tmp_path / "out.jsonl.rejected")] == ["r5"]


def test_requests_that_all_servers_refuse(start, config, tmp_path, monkeypatch):
    """It is not the conversations then: the run stops early, with the server's own words."""
    monkeypatch.setattr(pool, "_REFUSALS", 5)
    fake = start()
    fake.fault = lambda number, body: 422
    with pytest.raises(UserError, match=r"the first 5 requests were all refused by the server: 422 .*: fault 422"):
        regenerate(config(fake))
    assert len(fake.bodies) <= 5 + 2
    fake.fault = lambda number, body: None
    regenerate(config(fake))
    assert read(config(fake).output) == answered()


def test_no_conversation_answered_is_an_error(start, config, tmp_path):
    fake = start()
    fake.fault = lambda number, body: 400
    with pytest.raises(UserError, match=r"no conversation was answered; the reasons are in .*rejected"):
        regenerate(config(fake))
    assert len(read(tmp_path / "out.jsonl.rejected")) == len(RECORDS)
    assert not config(fake).output.exists()
    fake.fault = lambda number, body: None
    regenerate(config(fake))
    assert read(config(fake).output) == answered()
    assert not (tmp_path / "out.jsonl.rejected").exists(), "which is of the run before"


def test_a_busy_server_is_waited_for(start, config):
    """As long as it says; being busy is neither the server's failure nor the conversation's."""
    fake = start()
    times = []

    def fault(number, body):
        times.append(time.monotonic())
        return "busy_for_a_second" if number == 0 else "busy" if number < 20 else None

    fake.fault = fault
    regenerate(config(fake, concurrency=1))
    assert times[1] - times[0] > 0.99
    assert read(config(fake).output) == answered()


SINGLE = [{"id": f"r{i}", "conversations": [{"role": "user", "content": f"question {i}.0"}]} for i in range(60)]


@pytest.mark.parametrize("faster", [True, False])
def test_a_server_that_refuses_everything(faster, start, config, tmp_path):
    """Is not believed while another is there, however fast it refuses, and is asked no more after a while."""
    wrong, sound = start(), start()
    wrong.fault = lambda number, body: 400 if faster else time.sleep(0.1) or 400
    sound.delay = 0.03
    write(tmp_path / "in.jsonl", SINGLE)
    regenerate(config(wrong, sound))
    assert read(config(sound).output) == answered(SINGLE)
    assert not (tmp_path / "out.jsonl.rejected").exists()
    asked = sum(body["max_tokens"] == 16 for body in wrong.bodies)
    assert asked <= 6 + 3  # each of six workers before the first answer, and what it has when it is taken out


def test_a_wrong_server_that_is_there_first(start, config, tmp_path):
    """Is not believed before the other was asked for its model."""
    wrong, sound = start(), start()
    wrong.fault = lambda number, body: 400
    sound.probe_delay = 0.2
    regenerate(config(wrong, sound))
    assert read(config(sound).output) == answered()


def test_a_wrong_server_that_is_alone_for_a_while(start, config, tmp_path):
    """It never answered what others did: nothing is refused because of it while they are gone."""
    wrong, sound = start(), start()
    wrong.fault = lambda number, body: time.sleep(0.1) or 400
    sound.delay = 0.02

    def restart():
        sound.stop()
        time.sleep(0.4)
        sound.start()

    sound.fault = lambda number, body: threading.Thread(target=restart).start() if number == 8 else None
    write(tmp_path / "in.jsonl", SINGLE[:20])
    regenerate(config(wrong, sound, concurrency=1))
    assert read(config(sound).output) == answered(SINGLE[:20])


def test_a_server_that_begins_to_refuse_everything(start, config, tmp_path, monkeypatch):
    """With no other beside it, it loses a few conversations, not all that are left."""
    monkeypatch.setattr(endpoint, "PATIENCE_S", 0.3)
    fake = start()
    fake.fault = lambda number, body: 400 if number > 10 else None
    write(tmp_path / "in.jsonl", SINGLE)
    with pytest.raises(UserError, match=r"no server has answered.*refused by the server: 400"):
        regenerate(config(fake, concurrency=1))
    assert len(read(tmp_path / "out.jsonl.partial")) == 1 + 11 + 4
    fake.fault = lambda number, body: None
    regenerate(config(fake))
    assert read(config(fake).output) == answered(SINGLE)


def test_many_refused_conversations_in_a_row(start, config, tmp_path):
    """The server is tried, answers, and is then believed more often: it is out a few times, not every five."""
    fake = start()
    fake.fault = lambda number, body: 400 if int(first_asked(body)[9:-2]) > 10 else None
    records = [{"id": f"r{i}", "conversations": [{"role": "user", "content": f"question {i}.0"}]} for i in range(300)]
    write(tmp_path / "in.jsonl", records)
    regenerate(config(fake))
    assert read(config(fake).output) == answered(records[:11])
    assert len(read(tmp_path / "out.jsonl.rejected")) == 289
    assert 2 < fake.probes < 10


def test_a_refused_conversation_is_asked_of_all(start, config, tmp_path):
    """Once each, also where several follow one another; the servers stay in."""
    fakes = [start(), start()]
    refused = {f"question {i}.0" for i in (3, 20, 21, 22, 23, 24, 25, 26, 27, 50)}
    for fake in fakes:
        fake.delay = 0.01
        fake.fault = lambda number, body: 400 if body["messages"][0]["content"] in refused else None
    write(tmp_path / "in.jsonl", SINGLE)
    regenerate(config(*fakes))
    assert read(config(*fakes).output) == answered([r for r in SINGLE if first(r) not in refused])
    assert len(read(tmp_path / "out.jsonl.rejected")) == 10
    for fake in fakes:
        assert sum(first_asked(body) == "question 3.0" for body in fake.bodies) == 1


@pytest.mark.parametrize("status", [401, 403, 404, 405])
def test_a_conversation_that_looks_like_a_wrong_server(status, start, config, tmp_path):
    """What servers answer others in between is the conversation's own fault: it fails after as many tries as any."""
    fakes = [start(), start()]
    for fake in fakes:
        fake.fault = lambda number, body: status if first_asked(body) == "question 3.0" else None
    write(tmp_path / "in.jsonl", SINGLE[:21])
    with pytest.raises(UserError, match=r"^1 conversations failed for reasons that may pass"):
        regenerate(config(*fakes))
    regenerate(config(*fakes))
    assert read(config(*fakes).output) == answered(SINGLE[:3] + SINGLE[4:21])
    asked = [first_asked(body) for fake in fakes for body in fake.bodies]
    assert asked.count("question 3.0") <= 2 * (8 + 2)


def first(record):
    return record["conversations"][0]["content"]


def first_asked(body):
    return body["messages"][0]["content"]


# ---- servers that come and go


def test_no_server_left(start, config, tmp_path, capsys):
    """The command stops with one line after a while; what is answered is kept, and a second run goes on."""
    fake = start()

    def fault(number, body):
        if number == 9:
            threading.Thread(target=fake.stop).start()
            return "hang"

    fake.fault = fault
    started = time.monotonic()
    with pytest.raises(
        UserError, match=r"no server has answered for \d+ s \(http.*no connection.*run the same command"
    ):
        regenerate(config(fake))
    assert 2.0 < time.monotonic() - started < 6.0
    done = len(read(tmp_path / "out.jsonl.partial")) - 1
    assert done > 2
    before = len(fake.bodies)
    fake.fault = lambda number, body: None
    fake.start()
    regenerate(config(fake))
    assert read(config(fake).output) == answered()
    asked = {record["id"] for record in RECORDS} & {
        f"r{body['messages'][0]['content'][9:-2]}" for body in fake.bodies[before:]
    }
    assert len(asked) == len(RECORDS) - done


@pytest.mark.parametrize("fault, records", [(500, 12), ("busy", 1), (401, 1), (404, 1)])
def test_a_server_that_answers_probes_alone(fault, records, start, config, tmp_path, monkeypatch):
    """It tells its model and answers nothing: that is no server either. What is the server's alone is not held against
    a conversation, however often it happens."""
    monkeypatch.setattr(endpoint, "PATIENCE_S", 0.5)
    write(tmp_path / "in.jsonl", RECORDS[:records])
    fake = start()
    fake.fault = lambda number, body: fault
    with pytest.raises(UserError, match=r"no server has answered"):
        regenerate(config(fake))
    assert fake.probes > 2
    if fault != "busy":
        assert len(fake.bodies) <= 2 * 3 + fake.probes, "one conversation tries it, after each probe"


def test_a_trial_may_take_long(start, config, tmp_path, monkeypatch):
    """Longer than the command waits for a server: the one that is being tried may be about to answer."""
    monkeypatch.setattr(endpoint, "PATIENCE_S", 0.5)
    write(tmp_path / "in.jsonl", RECORDS[:1])
    fake = start()
    fake.fault = lambda number, body: 401 if number == 0 else None
    fake.delay = 1.0
    regenerate(config(fake))
    assert read(config(fake).output) == answered(RECORDS[:1])


def test_a_fault_from_before_an_outage(start, config, tmp_path):
    """Does not count against a server that came back: the requests that hung end while it answers others."""
    fake = start()
    fake.delay = 0.1
    fake.fault = lambda number, body: "hang" if number < 3 else 401 if number == 3 else None
    write(tmp_path / "in.jsonl", SINGLE[:20])
    regenerate(config(fake, concurrency=4, timeout=0.4))
    assert read(config(fake).output) == answered(SINGLE[:20])
    assert fake.probes == 3, "at the start twice, and once after the outage"


def test_a_host_that_is_gone(start, config, monkeypatch, capsys):
    """Without a word, as by a loss of power: its requests go to the other long before the time of an answer is over."""
    monkeypatch.setattr(endpoint, "SILENCE_S", 0.1)
    monkeypatch.setattr(endpoint, "_MODELS_S", 0.1)
    lost, sound = start(), start()

    def fault(number, body):
        if number == 2:
            lost.gone = True
        return "hang" if number >= 2 else None

    lost.fault = fault
    started = time.monotonic()
    regenerate(config(lost, sound, timeout=20.0))
    assert time.monotonic() - started < 5.0
    assert read(config(sound).output) == answered()
    assert f"{lost.url}: out (no answer within 0.1 s)" in capsys.readouterr().err


def test_a_long_answer_is_no_silence(start, config, monkeypatch):
    """A server that tells its model is left to write."""
    monkeypatch.setattr(endpoint, "SILENCE_S", 0.05)
    fake = start()
    fake.delay = 0.5
    regenerate(config(fake, concurrency=12))
    assert read(config(fake).output) == answered()
    assert len(fake.bodies) == sum(len(record["conversations"]) for record in RECORDS)
    assert fake.probes > 10


def at_request(count, action):
    """A fault that is none, but `action` at that request."""
    return lambda number, body: action() if number == count else None


def test_a_server_without_a_word(start, config, capsys):
    """A server that is not there yet is waited for, or the others work without it until it comes."""
    late, sound = start(), start()
    late.stop()
    with pytest.raises(UserError, match=r"no server answers \(http.*: no connection \(Connection refused\)"):
        regenerate(config(late))
    assert "waiting for a server" in capsys.readouterr().err
    sound.delay = 0.05
    sound.fault = at_request(3, late.start)
    regenerate(config(late, sound, concurrency=1))
    assert read(config(sound).output) == answered()
    assert late.bodies and "in again" in capsys.readouterr().err


def test_servers_of_different_models(start, config, capsys):
    """Are an error at the start; one that comes back with another model stays out."""
    one, other = start(), start(model="other")
    with pytest.raises(UserError, match=r"different models .*golden.*other"):
        regenerate(config(one, other))
    other.stop()
    one.delay = 0.05
    one.fault = at_request(3, other.start)
    regenerate(config(one, other, concurrency=1))
    assert not other.bodies and "out (has the model other, the others golden)" in capsys.readouterr().err
    smaller = start(context=100)
    smaller.stop()
    one.fault = at_request(len(one.bodies) + 3, smaller.start)
    regenerate(config(one, smaller, concurrency=1, output=config(one).output.with_name("2.jsonl")))
    assert not smaller.bodies and "has a context of 100 tokens, the others 512" in capsys.readouterr().err


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
