"""Servers that fail, come and go: real HTTP, faults injected."""

import threading
import time
from pathlib import Path

import pytest

from osprey_jax.command import UserError
from osprey_jax.decoding import endpoint
from osprey_jax.regenerate import regenerate
from tests.decoding.fake_server import RECORDS, SINGLE, answered, read, write

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
    monkeypatch.setattr(endpoint, "PROBE_S", 0.1)
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
