"""Regeneration that ends early, by whatever: nothing is lost, nothing twice. Behind servers, where a run is fast."""

import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from osprey_jax import regenerate as regenerate_module
from osprey_jax.command import UserError
from osprey_jax.config import RegenerateConfig
from osprey_jax.files import alone
from osprey_jax.regenerate import regenerate
from tests.decoding import fake_server
from tests.decoding.fake_server import RECORDS, FakeServer, answered, read, write

ROOT = Path(__file__).parents[1]
TARGET = ROOT / "tests/golden/qwen3/target"


@pytest.fixture
def fake():
    server = FakeServer()
    yield server
    server.stop()


@pytest.fixture
def config(tmp_path, fake):
    write(tmp_path / "in.jsonl", RECORDS)
    return RegenerateConfig(
        target=TARGET,
        servers=[fake.url],
        input=[str(tmp_path / "in.jsonl")],
        output=tmp_path / "out.jsonl",
        max_new_tokens=16,
        concurrency=2,
    )


def partial(config):
    return config.output.with_name("out.jsonl.partial")


def interrupted(config, fake, requests):
    """Answer some of the records, then end as by Ctrl-C; the ids of those that are done."""
    answer, count = fake.answer, 0

    def stop_at(body):
        nonlocal count
        count += 1
        if count == requests:
            os.kill(os.getpid(), signal.SIGINT)
        return answer(body)

    fake.answer = stop_at
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores it
    with pytest.raises(KeyboardInterrupt):
        regenerate(config)
    signal.signal(signal.SIGINT, before)
    fake.answer = answer
    fake.bodies.clear()
    return {line["id"] for line in read(partial(config))[1:]}


def asked(fake):
    return {body["messages"][0]["content"] for body in fake.bodies}


def first(record):
    return record["conversations"][0]["content"]


def test_an_interrupted_run_goes_on(config, fake):
    """What is done is not asked again, and the output is that of a run in one go."""
    done = interrupted(config, fake, 12)
    assert 0 < len(done) < len(RECORDS)
    regenerate(config)
    assert asked(fake) == {first(record) for record in RECORDS if record["id"] not in done}
    assert read(config.output) == answered()
    assert sorted(path.name for path in config.output.parent.iterdir()) == ["in.jsonl", "out.jsonl"]


def test_the_input_may_be_another(config, fake, tmp_path):
    """Records are known by what they are, not where they stand: other order, other files, more and fewer of them."""
    done = interrupted(config, fake, 12)
    new = [{"id": "new", "conversations": [{"role": "user", "content": "new"}]}]
    records = [*new, *RECORDS[:0:-1]]
    write(tmp_path / "in.jsonl", records[:4])
    write(tmp_path / "more.jsonl", records[4:])
    regenerate(config.model_copy(update={"input": [*config.input, str(tmp_path / "more.jsonl")]}))
    assert asked(fake) == {first(record) for record in records if record["id"] not in done}
    assert read(config.output) == answered(records)


def test_a_record_that_changed_is_asked_again(config, fake, tmp_path):
    """Under the same id, other user turns are another question; other fields and old answers are not."""
    done = interrupted(config, fake, 14)
    changed, same = [record for record in RECORDS if record["id"] in done][:2]
    changed = changed | {"conversations": [{"role": "user", "content": "something else"}]}
    old_answer = {"role": "assistant", "content": "old"}
    kept = same | {"source": "x", "conversations": [*same["conversations"], old_answer]}
    by_id = {record["id"]: record for record in RECORDS} | {changed["id"]: changed, kept["id"]: kept}
    write(tmp_path / "in.jsonl", list(by_id.values()))
    regenerate(config)
    assert asked(fake) == {first(record) for record in RECORDS if record["id"] not in done} | {"something else"}
    by_id[kept["id"]] = same | {"source": "x"}
    assert read(config.output) == answered(list(by_id.values()))


def test_ids_that_repeat(config, fake, tmp_path):
    """Each record is answered, whether the others of its id ask the same or not; so are those without an id."""
    one, two = [{"role": "user", "content": "one"}], [{"role": "user", "content": "two"}]
    records = [{"conversations": one}] * 2 + [{"id": "a", "conversations": one}, {"id": "a", "conversations": two}] * 2
    write(tmp_path / "in.jsonl", records)
    assert interrupted(config, fake, 5)
    done = len(read(partial(config))) - 1
    assert done > 2
    write(tmp_path / "in.jsonl", records[::-1])
    regenerate(config)
    assert len(fake.bodies) == len(records) - done
    assert read(config.output) == answered(records[::-1])


def test_seeds_of_equal_records_differ(config, fake, tmp_path):
    """A record that stands there twice is sampled twice."""
    write(tmp_path / "in.jsonl", [RECORDS[0]] * 3)
    regenerate(config)
    assert len({body["seed"] for body in fake.bodies}) == 3


def test_a_torn_last_line_is_dropped(config, fake):
    """Wherever a kill cut the partial output, also within its first line."""
    interrupted(config, fake, 12)
    whole = partial(config).read_bytes()
    for end in (0, 1, 30, whole.index(b"\n") + 1, len(whole) - 1, len(whole) - 40):
        partial(config).write_bytes(whole[:end])
        regenerate(config)
        assert read(config.output) == answered()
        config.output.unlink()


def test_another_run_on_the_same_output(config):
    """Is refused while the first one goes on."""
    lock = config.output.with_name(f".{config.output.name}.lock")
    with alone(config.output, lock), pytest.raises(UserError, match="another run is writing it"):
        regenerate(config)
    regenerate(config)
    assert read(config.output) == answered()


def test_the_input_changes_meanwhile(config, fake, tmp_path):
    """A record that was not there when the answering began is missed, not left out in silence."""

    def answer(body):
        write(tmp_path / "in.jsonl", [*RECORDS, {"id": "late", "conversations": RECORDS[0]["conversations"]}])
        return fake_server.echo(body)

    fake.answer = answer
    with pytest.raises(UserError, match=r"in.jsonl:13: the input changed"):
        regenerate(config)
    regenerate(config)
    assert len(read(config.output)) == 13


def test_records_keep_their_fields_but_the_old_turns(config, tmp_path):
    """Other names of the turns go, and the tools, whose calls and results go too."""
    turns = RECORDS[1]["conversations"]
    write(tmp_path / "in.jsonl", [{"id": "a", "x": 1, "messages": turns, "tools": [{"name": "f"}], "unanswered": 3}])
    regenerate(config)
    assert read(config.output) == answered([{"id": "a", "x": 1, "conversations": turns}])


def test_what_json_does_not_have(config, tmp_path):
    """NaN in another field becomes null: other readers refuse a file with it."""
    turns = RECORDS[1]["conversations"]
    extra = {"x": float("nan"), "y": [float("inf"), {"z": -float("inf")}], "n": 1.5}
    write(tmp_path / "in.jsonl", [{"id": "a", "conversations": turns} | extra])
    regenerate(config)
    wanted = {"id": "a", "conversations": turns, "x": None, "y": [None, {"z": None}], "n": 1.5}
    assert read(config.output) == answered([wanted])


def test_help_is_whole():
    """What the fields of the output mean is told where one asks for it."""
    command = [sys.executable, "-m", "osprey_jax.regenerate", "--help"]
    said = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    assert regenerate_module.__doc__ in said


# ---- kills


def many(kills):
    """Records enough for that many kills: a tenth of a second of work for two servers takes eight turns or so."""
    turns = lambda i: [{"role": "user", "content": f"question {i}.{turn}"} for turn in range(1 + i % 3)]
    return [{"id": f"r{i}", "conversations": turns(i)} for i in range(20 + 40 * kills)]


def start_server(port, delay="0.05"):
    """In a process of its own, which takes some tenths of a second to answer."""
    command = [sys.executable, fake_server.__file__, str(port), delay]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def start_command(config):
    values = config.model_dump(mode="json", exclude_defaults=True)
    (config.output.parent / "regenerate.yaml").write_text(json.dumps(values))  # JSON is YAML
    command = [sys.executable, "-m", "osprey_jax.regenerate", "--config", str(config.output.parent / "regenerate.yaml")]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def kill(process):
    process.kill()
    process.wait()
    if process.stdout:
        process.stdout.close()


def free_ports(count):
    sockets = [socket.socket() for _ in range(count)]
    for one in sockets:
        one.bind(("127.0.0.1", 0))
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


@pytest.fixture
def killing(tmp_path):
    """(config, its two servers by port)."""
    ports = free_ports(2)
    config = RegenerateConfig(
        target=TARGET,
        servers=[f"http://127.0.0.1:{port}" for port in ports],
        input=[str(tmp_path / "in.jsonl")],
        output=tmp_path / "out.jsonl",
        max_new_tokens=16,
        concurrency=2,
    )
    processes = {port: start_server(port) for port in ports}
    yield config, processes
    for process in processes.values():
        kill(process)


KILLS = [2, pytest.param(20, marks=pytest.mark.slow)]


@pytest.mark.parametrize("kills", KILLS)
def test_killed_at_random_moments(kills, killing):
    """By SIGKILL or SIGTERM, again and again: the output is an undisturbed run's."""
    config, _ = killing
    write(Path(config.input[0]), many(kills))
    rng, seen = random.Random(kills), 0
    for _ in range(kills):
        process, before = start_command(config), seen
        try:
            end = time.monotonic() + 60
            while process.poll() is None and seen == before and time.monotonic() < end:  # until it has begun
                seen = partial(config).read_bytes().count(b"\n") if partial(config).exists() else 0
                time.sleep(0.005)
            time.sleep(rng.uniform(0, 0.8))
            process.send_signal(rng.choice([signal.SIGKILL, signal.SIGTERM]))
            said, _ = process.communicate(timeout=30)
            assert "Traceback" not in said
        finally:
            kill(process)
        if config.output.exists():
            break
    done = len(read(config.output)) if config.output.exists() else seen
    assert done, "no kill met a run at work"
    process = start_command(config)
    said, _ = process.communicate(timeout=120)
    assert process.returncode == 0 or "already exists" in said, said
    assert read(config.output) == answered(many(kills))


@pytest.mark.parametrize("kills", KILLS)
def test_servers_killed_at_random_moments(kills, killing):
    """One or both of them: the output is that of undisturbed servers, and nothing is listed as failed."""
    config, processes = killing
    write(Path(config.input[0]), many(kills))
    rng = random.Random(kills)
    process = start_command(config)
    try:
        end = time.monotonic() + 60
        while not partial(config).exists() and process.poll() is None and time.monotonic() < end:
            time.sleep(0.02)
        happened = 0
        for _ in range(kills):
            port = rng.choice(list(processes))
            time.sleep(rng.uniform(0, 0.4))
            happened += process.poll() is None
            kill(processes[port])
            time.sleep(rng.uniform(0, 0.3))
            processes[port] = start_server(port)
        said, _ = process.communicate(timeout=120)
    finally:
        kill(process)
    assert process.returncode == 0, said
    assert happened == kills, "the run was over too soon"
    assert ": out (" in said and "in again" in said
    assert read(config.output) == answered(many(kills))
    assert not config.output.with_name("out.jsonl.rejected").exists()
