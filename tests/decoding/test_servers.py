"""The pool, through the command: real HTTP, faults injected."""

import json
import threading
import time
from pathlib import Path

import pytest

from osprey_jax.config import RegenerateConfig
from osprey_jax.decoding import endpoint
from osprey_jax.regenerate import regenerate
from tests.decoding.fake_server import FakeServer, echo

TARGET = Path(__file__).parents[1] / "golden/qwen3/target"

RECORDS = [
    {"id": f"r{i}", "conversations": [{"role": "user", "content": f"question {i}.{turn}"} for turn in range(1 + i % 3)]}
    for i in range(12)
]


def write(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def answered(records=RECORDS):
    """What an undisturbed server makes of `records`."""
    out = []
    for record in records:
        messages, reasons = [], []
        for turn in record["conversations"]:
            messages = [*messages, turn]
            made = echo({"messages": messages, "max_tokens": 16})
            messages = [*messages, made["message"]]
            reasons.append(made["finish_reason"])
        out.append(record | {"conversations": messages, "finish_reasons": reasons})
    return out


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


def test_a_dead_server_is_taken_out_and_taken_back(start, config, capsys):
    """Its conversations go to the other; it is asked again until it answers, and then has its share."""
    dying, other = start(), start()
    other.delay = 0.03

    def restart():
        dying.stop()
        time.sleep(0.2)
        dying.start()

    def fault(number, body):
        if number == 2:
            threading.Thread(target=restart).start()
            return "reset"

    dying.fault = fault
    records = [{"id": str(i), "conversations": RECORDS[2]["conversations"]} for i in range(60)]
    write(Path(config(other).input[0]), records)
    regenerate(config(dying, other))
    assert read(config(other).output) == answered(records)
    said = capsys.readouterr().err
    assert f"{dying.url}: out (" in said and f"{dying.url}: in again" in said
    assert len(dying.bodies) > 30
