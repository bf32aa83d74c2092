"""The same command again, or a changed one: what is kept, what is asked, what is never mixed."""

import shutil

import pytest

from osprey_jax.command import UserError
from osprey_jax.config import OFF
from osprey_jax.decoding.target import open_target
from osprey_jax.evaluate import evaluate
from osprey_jax.evaluation import load
from osprey_jax.evaluation.prompts import read_prompt_set
from osprey_jax.serving import process
from tests.conftest import GOLDEN
from tests.evaluation.fake_sglang import SPECULATING, Handler
from tests.evaluation.test_behind_servers import LIMIT, RECORDS, TARGET, asked, config, results, start
from tests.serving.fake_environment import fake_python

__all__ = ["config", "start"]  # fixtures


def with_handler(server, **methods):
    server.handler = type("Changed", (Handler,), methods)
    server.stop()
    server.start()
    return server


def names(result):
    return [(request["id"], request["turn"]) for request in result["requests"]]


def test_levels_measured_on_two_kinds_of_server(start, config):
    """Each is complete, in a file of its own; together they would be one arm that nobody ran. Nothing is asked."""
    off = start()
    evaluate(config(off, concurrency=[1]))
    off.info = off.info | {"version": "0.5.9"}
    before = len(off.bodies)
    with pytest.raises(UserError, match=r"off@p@1.*was begun on a server with another version"):
        evaluate(config(off, concurrency=[2, 1]))
    assert len(off.bodies) == before
    evaluate(config(off, concurrency=[2]))
    with pytest.raises(UserError, match=r"off@p@2.*was begun on a server with another version"):
        evaluate(config(off, concurrency=[1, 2]))


def test_more_arms_levels_and_sets(start, config):
    """What is added is asked, of whom it is missing; in the end all of it stands there."""
    off, first, second = start(), start(**SPECULATING), start(**SPECULATING)
    servers = {"a": first}
    evaluate(config(off, drafters=dict(servers)))
    counts = [len(asked(server)) for server in (off, first)]
    evaluate(config(off, drafters=servers | {"b": second}))
    assert [len(asked(server)) for server in (off, first)] == counts and len(asked(second)) == len(RECORDS)
    evaluate(config(off, drafters=dict(servers), concurrency=[4, 1]))
    assert [len(asked(server)) for server in (off, first)] == [2 * count for count in counts]
    evaluate(made := config(off, drafters=dict(servers), concurrency=[1, 4], prompts=["mt", "p"]))
    # Six items of three turns at two levels; of `p`, nothing.
    assert [len(asked(server)) for server in (off, first)] == [2 * count + 12 for count in counts]
    found = results(made)["results"]
    assert [(r["arm"], r["concurrency"], r["prompts"]) for r in found] == [
        (arm, level, prompts) for arm in (OFF, "a") for level in (1, 4) for prompts in ("mt", "p")
    ]
    assert all(r["failed"] == r["not_compared"] == 0 for r in found if r["arm"] == "a")


@pytest.fixture
def target(tmp_path):
    shutil.copytree(TARGET, tmp_path / "target")
    return tmp_path / "target"


@pytest.mark.parametrize("changed", ["steps", "drafter", "target"])
def test_what_another_drafter_or_target_answered_is_not_kept(start, config, tmp_path, target, changed):
    """Its figures would stand under this one's name; what was measured with the old one stays for who goes back."""
    off, drafter = start(), start(**SPECULATING)
    (tmp_path / "d").mkdir()
    (tmp_path / "d/config.json").write_text("{}")
    evaluate(config(off, drafters={"d": drafter}, target=target))
    changes = {}
    if changed == "steps":
        drafter.info = drafter.info | {"speculative_num_steps": 3}
        changes["draft_steps"] = 3
    elif changed == "drafter":
        (tmp_path / "d/config.json").write_text('{"other": 1}')
    else:
        (target / "model.bin").write_bytes(b"other weights")
    evaluate(config(off, drafters={"d": drafter}, target=target, **changes))
    assert len(asked(drafter)) == 2 * len(RECORDS)
    assert len(asked(off)) == (2 if changed == "target" else 1) * len(RECORDS)
    if changed == "steps":
        drafter.info = drafter.info | {"speculative_num_steps": 5}
    (tmp_path / "d/config.json").write_text("{}")
    (target / "model.bin").unlink(missing_ok=True)
    evaluate(config(off, drafters={"d": drafter}, target=target))
    assert len(asked(drafter)) == 2 * len(RECORDS)


def test_a_server_started_and_one_that_runs(start, config, python, tmp_path):
    """Two kinds of server, as are two with other flags: each is measured by itself, and starts only for what lacks."""
    started = {"sglang_python": python, "servers": {}}
    counted = tmp_path / "seen.json"

    def starts(made):
        counted.unlink(missing_ok=True)
        evaluate(made)
        return counted.exists()

    off = start()
    evaluate(config(off))
    assert starts(config(**started)) and not starts(config(**started))
    assert starts(config(**started, sglang_arguments=["--tp", 2]))
    assert not starts(config(**started))
    assert len(asked(off)) == len(RECORDS)
    evaluate(config(off))
    assert len(asked(off)) == len(RECORDS)


@pytest.fixture
def python(tmp_path, monkeypatch):
    monkeypatch.setattr(process, "_POLL_S", 0.05)
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    return fake_python(tmp_path, "no_speculation")


def test_a_started_server_is_asked_with_its_key(config, python):
    """The flag that protects it would keep us out."""
    evaluate(made := config(sglang_python=python, servers={}, sglang_arguments=["--api-key", "k"]))
    assert results(made)["results"][0]["requests"][0]["attempts"] == 1


def test_nothing_is_measured_that_cannot_go_on(config, python, tmp_path):
    """A name misspelt, or a flag, of the last arm is said before the first is measured for hours."""
    drafters = {"good": GOLDEN / "qwen3/expected/converted", "bad": tmp_path / "misspelt"}
    with pytest.raises(UserError, match="misspelt: no such directory"):
        evaluate(config(sglang_python=python, servers={}).model_copy(update={"drafters": drafters}))
    with pytest.raises(UserError, match="--model-path: is set here"):
        evaluate(config(sglang_python=python, servers={}, sglang_arguments=["--model-path", "x"]))
    assert not (tmp_path / "seen.json").exists()


def test_a_started_server_that_dies(config, python, tmp_path):
    """It does not come back by itself: nobody waits, its log is named, and the next run goes on with a new one."""
    dying = config(sglang_python=fake_python(tmp_path, "dies_later"), servers={}, drafters={})
    with pytest.raises(UserError, match=r"off: the server ended with status -?\d+ \(.*off\.log\); what is finished is"):
        evaluate(dying)
    [kept] = (dying.out / "parts").glob("*.jsonl")
    assert len(kept.read_text().splitlines()) == 2 + 3  # settings, server; the first request of five warmed up
    evaluate(dying.model_copy(update={"sglang_python": python}))
    found = results(dying)["results"][0]
    assert found["failed"] == 0 and len(found["requests"]) == len(RECORDS)


def test_two_runs_at_a_time(start, config):
    """They would ask everything twice, into one file."""
    off, tried, refused = start(), [], []

    def once(number, body):
        if not tried:
            tried.append(1)
            with pytest.raises(UserError, match="out: another run is writing it"):
                evaluate(made)
            refused.append(1)  # what is raised in the server's thread, nobody hears

    off.fault = once
    made = config(off)
    evaluate(made)
    assert refused and len(asked(off)) == len(RECORDS) and not list(made.out.glob("parts/.*"))


def test_other_answers_before_a_turn(start, config):
    """Turns follow what the first level wrote: where that is another text, they are other prompts, and asked."""

    def completion(self, body):
        value = Handler._completion(self, body)
        value["text"] += " loaded" if self.server_fake.loaded else ""
        return value

    off, drafter = (with_handler(server, _completion=completion) for server in (start(), start(**SPECULATING)))
    off.loaded = drafter.loaded = False
    evaluate(config(off, prompts=["mt"], drafters={"d": drafter}, concurrency=[1]))
    off.loaded = drafter.loaded = True
    counts = [len(asked(server)) for server in (off, drafter)]
    evaluate(made := config(off, prompts=["mt"], drafters={"d": drafter}, concurrency=[2, 1]))
    assert [len(asked(server)) - count for server, count in zip((off, drafter), counts, strict=True)] == [10, 10]
    found = results(made)["results"]
    lengths = [[request["prompt_tokens"] for request in result["requests"]] for result in found]
    assert lengths[0] == lengths[1] == lengths[2] == lengths[3]


def test_what_is_skipped_is_said_once(start, config):
    """Also where one run looks at the same answers twice."""
    off = start()
    firsts = []
    off.fault = lambda number, body: 400 if body["input_ids"] not in firsts else None
    made = config(off, prompts=["mt"])
    prompts = read_prompt_set("mt", made.prompts["mt"], made, open_target(TARGET, {}))
    firsts += [item.request.prompt for item in prompts.items]
    evaluate(made)
    evaluate(made := config(off, prompts=["mt"], concurrency=[1, 2]))
    assert [r["reason"] for r in results(made)["skipped"]["mt"]] == ["turn 1 was not answered"] * 2


def test_times(start, config):
    """Of a token after the first alone; the first is there before the last; throughput is of all requests together."""
    off = start()
    off.delay = 0.05  # before each of three events, the first of one token
    evaluate(made := config(off, concurrency=[4]))
    [found] = results(made)["results"]
    for request in found["requests"]:
        decoding = request["seconds"] - request["time_to_first_token"]
        assert request["time_to_first_token"] > 0.04 and decoding > 0.08
        rest = request["completion_tokens"] - 1
        assert request["decode_tokens_per_second"] == pytest.approx(rest / decoding)
        assert request["milliseconds_per_token"] == pytest.approx(1e3 * decoding / rest)
    assert found["throughput"] == pytest.approx(found["completion_tokens"] / found["busy_seconds"])
    longest = max(request["seconds"] for request in found["requests"])
    assert longest <= found["busy_seconds"] < sum(request["seconds"] for request in found["requests"]) / 2


@pytest.mark.parametrize("device, gpus", [("cuda", 12), ("cpu", None)])
def test_gpus_are_counted(start, config, capsys, device, gpus):
    """Costs are reckoned by them. A server with too few places for a level says so before."""
    off = start(device=device, tp_size=2, pp_size=3, dp_size=2, max_running_requests=3)
    evaluate(made := config(off, concurrency=[3, 4]))
    assert (results(made)["hardware"]["device"], results(made)["hardware"]["gpus"]) == (device, gpus)
    assert capsys.readouterr().err.count("warning: off: takes 3 requests at one time, not 4") == 1


def test_a_cache_that_is_not_emptied(start, config, capsys):
    """Prompts answered out of it would look fast; that is said, once for each level."""
    off = with_handler(start(), _flush=lambda self: self._send(400, b"busy"))
    evaluate(config(off, concurrency=[1, 2]))
    assert capsys.readouterr().err.count("off: warning: does not empty its cache") == 2


def test_failures_that_are_not_in_a_row(start, config, monkeypatch):
    """A prompt here and there that the server cannot answer is no server that fails everything."""
    monkeypatch.setattr(load, "_FAILURES", 2)
    off = start()
    every_other = []
    off.fault = lambda number, body: 500 if asked(off).index(body) in every_other else None
    evaluate(made := config(off))
    every_other += [0, 2, 4]
    evaluate(made := config(off, max_new_tokens=LIMIT, out=made.out.with_name("other")))
    assert results(made)["results"][0]["failed"] == 3


def test_a_text_is_compared_with_that_of_its_own_level(start, config):
    """Under load the target alone may write another text too, which is not the drafter's doing."""

    def completion(self, body):
        value = Handler._completion(self, body)
        value["output_ids"][2] = self.server_fake.flushes  # emptied before each level
        return value

    off, drafter = (with_handler(server, _completion=completion) for server in (start(), start(**SPECULATING)))
    evaluate(made := config(off, drafters={"d": drafter}, concurrency=[1, 2]))
    found = results(made)["results"]
    assert [(r["arm"], r["differing"], r["not_compared"]) for r in found[2:]] == [("d", 0, 0), ("d", 0, 0)]
    assert found[0]["requests"][0]["first_difference"] is None


def test_a_turn_that_was_not_reached_is_asked_of_nobody(start, config):
    """What the first level did not answer has no next turn, at no level and of no arm; asked again, it has."""
    off, drafter = start(), start(**SPECULATING)
    off.fault = lambda number, body: 500 if off.flushes == 1 else None  # the first level alone
    made = config(off, prompts=["mt"], drafters={"d": drafter}, concurrency=[2, 1])
    evaluate(made)
    found = results(made)["results"]
    assert [len(r["requests"]) for r in found] == [0, 2, 2, 2] and found[0]["failed"] == 2
    assert [r["reason"] for r in results(made)["skipped"]["mt"]] == ["turn 0 was not answered"] * 2
    evaluate(made)
    found = results(made)["results"]
    wanted = [(f"{80 + i}", turn) for turn in range(3) for i in range(2)]
    assert all(names(r) == wanted and r["failed"] == 0 for r in found)
    assert results(made)["skipped"]["mt"] == []
    assert all(request["lost_seconds"] > 0 for request in found[0]["requests"][:2])


def test_more_time_for_what_had_too_little(start, config):
    """What was answered in the shorter time stays; what was not, is asked again."""
    off = start()
    off.fault = lambda number, body: "hang" if body["input_ids"] == asked(off)[0]["input_ids"] else None
    evaluate(config(off, timeout=0.3))
    off.fault = lambda number, body: None
    before = len(asked(off))
    evaluate(made := config(off, timeout=20.0))
    assert len(asked(off)) == before + 1 and results(made)["results"][0]["failed"] == 0


def test_a_server_of_other_files_is_said(start, config, capsys):
    """Two URLs that changed places would give each drafter the other's figures."""
    evaluate(config(start(model_path="/elsewhere/target"), drafters={"d": start(**SPECULATING)}))
    err = capsys.readouterr().err
    assert "servers.d: serves draft; the config says" in err and "servers.off: serves" not in err
