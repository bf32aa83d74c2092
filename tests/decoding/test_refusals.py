"""Conversations that are refused and servers that refuse: real HTTP, faults injected."""

import threading
import time

import pytest

from osprey_jax.command import UserError
from osprey_jax.decoding import endpoint, pool
from osprey_jax.regenerate import regenerate
from tests.decoding.fake_server import RECORDS, SINGLE, answered, read, write


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
