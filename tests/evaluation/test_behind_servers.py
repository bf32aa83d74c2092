"""Measuring behind servers that fail: what is said, what is kept, and that the same command goes on."""

import json
import threading

import pytest
import yaml

from osprey_jax.command import UserError
from osprey_jax.config import OFF, EvaluateConfig
from osprey_jax.decoding import endpoint
from osprey_jax.decoding.target import open_target
from osprey_jax.evaluate import evaluate, main
from osprey_jax.evaluation import load
from tests.conftest import GOLDEN
from tests.evaluation.fake_sglang import SPECULATING, FakeSGLang, answer

TARGET = GOLDEN / "qwen3/target"
RECORDS = [{"id": f"r{i}", "conversations": [{"role": "user", "content": f"of {i}"}]} for i in range(8)]
LIMIT = 20  # more than warming up asks for
TURNS = [{"question_id": 80 + i, "turns": [f"of {i}", f"the {i}", "and"]} for i in range(2)]


@pytest.fixture
def start(monkeypatch):
    """Starts fake servers; nobody waits long for them."""
    monkeypatch.setattr(endpoint, "FIRST_DELAY_S", 0.02)
    monkeypatch.setattr(load, "FIRST_DELAY_S", 0.02)
    monkeypatch.setattr(load, "PATIENCE_S", 1.0)
    servers = []

    def make(**info):
        servers.append(FakeSGLang(**info))
        return servers[-1]

    yield make
    for server in servers:
        server.stop()


@pytest.fixture
def config(tmp_path):
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(record) + "\n" for record in RECORDS))
    (tmp_path / "mt.jsonl").write_text("".join(json.dumps(record) + "\n" for record in TURNS))

    def make(off=None, prompts=("p",), **changes):
        servers = ({} if off is None else {OFF: off.url}) | {
            name: server.url for name, server in changes.pop("drafters", {}).items()
        }
        values = {
            "engine": "sglang",
            "target": TARGET,
            "drafters": {name: tmp_path / name for name in servers if name != OFF},
            "servers": servers,
            "prompts": {name: tmp_path / f"{name}.jsonl" for name in prompts},
            "out": tmp_path / "out",
            "max_new_tokens": LIMIT,
        }
        return EvaluateConfig(**values | changes)

    return make


def results(config):
    return json.loads((config.out / "results.json").read_text())


def asked(server):
    """Requests beyond those that warm up."""
    return [body for body in server.bodies if body["sampling_params"]["max_new_tokens"] == LIMIT]


def without_times(result):
    """What does not depend on how fast it went."""
    lasting = ("id", "turn", "prompt_tokens", "completion_tokens", "verifications", "histogram", "text", "matches_off")
    return [{key: request[key] for key in lasting} for request in result["requests"]]


def test_what_the_server_says_is_what_is_written(start, config):
    """Every arm at every level; counts, histograms and text are the server's; its cache is emptied before a level."""
    off, drafter = start(), start(**SPECULATING)
    made = config(off, drafters={"d": drafter}, concurrency=[1, 4])
    evaluate(made)
    found = results(made)["results"]
    assert [(r["arm"], r["concurrency"]) for r in found] == [(OFF, 1), (OFF, 4), ("d", 1), ("d", 4)]
    target = open_target(TARGET, {})
    for result in found:
        assert [request["id"] for request in result["requests"]] == [record["id"] for record in RECORDS]
        assert without_times(result) == without_times(found[0] if result["arm"] == OFF else found[2])
    for record, request in zip(RECORDS, found[2]["requests"], strict=True):
        ids = answer(target.prompt_ids(record["conversations"]), LIMIT)
        verifications = -(-(len(ids) - 1) // 2)
        assert (request["completion_tokens"], request["verifications"]) == (len(ids), verifications)
        assert request["histogram"] == [0, verifications] and request["text"] == " ".join(map(str, ids))
        assert request["finish_reason"] == ("length" if len(ids) == LIMIT else "stop")
        assert request["matches_off"] is True and request["attempts"] == 1
        assert 0 < request["time_to_first_token"] <= request["seconds"]
    assert found[0]["requests"][0]["verifications"] is None and found[0]["accepted_length"] is None
    assert off.flushes == drafter.flushes == 2


def test_levels_are_kept(start, config):
    """Never more requests at a time than the level says, and so many where there are enough."""
    off = start()
    off.delay = 0.1
    evaluate(config(off, concurrency=[3]))
    assert off.most == 3 and len(off.bodies) == 3 + len(RECORDS)


def test_incremental_streams(start, config):
    """A server that sends only what is new each time writes the same."""
    plain, incremental = start(), start(incremental_streaming_output=True)
    evaluate(made := config(plain))
    evaluate(other := config(incremental, out=made.out.with_name("other")))
    assert without_times(results(made)["results"][0]) == without_times(results(other)["results"][0])


def test_texts_that_differ_are_shown(start, config, capsys):
    """A drafter that changes the text is not what greedy speculation is."""
    off, drafter = start(), start(**SPECULATING)
    drafter.handler = type("Other", (drafter.handler,), {"_completion": lambda self, body: changed(self, body)})
    drafter.stop()
    drafter.start()
    made = config(off, drafters={"d": drafter})
    evaluate(made)
    found = results(made)["results"][1]
    differing = [request for request in found["requests"] if request["matches_off"] is False]
    assert found["differing"] == len(differing) == 8
    assert differing[0]["first_difference"]["token"] == 2
    assert "8 texts differ from off; r0 from token 2" in capsys.readouterr().out


def changed(handler, body):
    from tests.evaluation.fake_sglang import Handler

    value = Handler._completion(handler, body)
    value["output_ids"][2] += 1
    return value


def test_later_turns_follow_the_targets_own_answers(start, config):
    """All arms are asked the same: what the target writes without speculation stands in every history."""
    off, drafter = start(), start(**SPECULATING)
    made = config(off, prompts=["mt"], drafters={"d": drafter}, concurrency=[2, 1])
    evaluate(made)
    found = results(made)["results"]
    names = [(f"{80 + i}", turn) for turn in range(3) for i in range(2)]
    assert all([(r["id"], r["turn"]) for r in result["requests"]] == names for result in found)
    target = open_target(TARGET, {})
    first = [{"role": "user", "content": "of 0"}]
    history = [*first, target.message(first, " ".join(map(str, answer(target.prompt_ids(first), LIMIT))))]
    wanted = target.prompt_ids([*history, {"role": "user", "content": "the 0"}])
    for server in (off, drafter):
        assert sum(body["input_ids"] == wanted for body in asked(server)) == 2
    assert all(without_times(result) == without_times(found[i - i % 2]) for i, result in enumerate(found))


def test_no_later_turns_without_the_targets_own(start, config, capsys):
    """Nobody knows what would stand in the history; the first turns are asked, and that is said."""
    made = config(prompts=["mt"], drafters={"d": start(**SPECULATING)})
    evaluate(made)
    assert [request["turn"] for request in results(made)["results"][0]["requests"]] == [0, 0]
    assert "the first alone are asked" in capsys.readouterr().err
    assert results(made)["results"][0]["not_compared"] == 2


PASSING = ["reset", "garbage", "truncated", "cut", "breaks_off", "abort", "other_count", "error_event", 500, 503]


@pytest.mark.parametrize("fault", PASSING)
def test_what_passes_is_tried_again(start, config, fault):
    """One failure is no result: the request is asked again, its lost time and attempts are on record."""
    off = start()
    seen = []
    off.fault = lambda number, body: fault if body in asked(off)[2:3] and not seen and not seen.append(1) else None
    made = config(off)
    evaluate(made)
    found = results(made)["results"][0]
    assert [request["attempts"] for request in found["requests"]] == [1, 1, 2, 1, 1, 1, 1, 1]
    assert found["requests"][2]["lost_seconds"] > 0 and found["failed"] == 0
    assert found["busy_seconds"] >= sum(r["seconds"] + r["lost_seconds"] for r in found["requests"]) * 0.999


def test_what_fails_always_is_counted(start, config, capsys):
    """A request that no try answers is a failure with its reason, the others go on; a second run asks it again."""
    off = start()
    wrong = []
    off.fault = lambda number, body: 500 if not wrong and body["input_ids"] == asked(off)[0]["input_ids"] else None
    made = config(off)
    evaluate(made)
    found = results(made)["results"][0]
    [failure] = found["failures"]
    assert failure["id"] == "r0" and failure["attempts"] == 3 and failure["reason"].startswith("500")
    assert "1 requests failed" in capsys.readouterr().out
    assert [request["id"] for request in found["requests"]] == [f"r{i}" for i in range(1, 8)]
    wrong.append("no more")
    before = len(off.bodies)
    evaluate(made)
    found = results(made)["results"][0]
    assert len(off.bodies) == before + 2, "the one that failed, and its warming up"
    assert found["failures"] == [] and found["requests"][0]["attempts"] == 4


def test_a_refusal_is_for_good(start, config, capsys):
    """A prompt that the server does not take, though it takes others, is not asked again and again; that is said."""
    off = start()
    off.fault = lambda number, body: 400 if body["input_ids"] == asked(off)[0]["input_ids"] else None
    made = config(off)
    evaluate(made)
    assert results(made)["results"][0]["failures"][0]["attempts"] == 1
    assert "1 requests were refused by the server, and are not asked again" in capsys.readouterr().out
    before = len(off.bodies)
    evaluate(made)
    assert len(off.bodies) == before


def test_a_server_that_refuses_everything(start, config):
    """It is not the prompts then: one line, and a server that was put right is asked all of them."""
    off = start()
    off.fault = lambda number, body: 400
    with pytest.raises(UserError, match="off: the first 5 requests were all refused by the server: 400"):
        evaluate(made := config(off))
    assert not (made.out / "results.json").exists()
    off.fault = lambda number, body: None
    evaluate(made := config(off))
    assert results(made)["results"][0]["failed"] == 0


def test_a_server_that_fails_everything(start, config):
    """Soon it is the server: one line, and not an evaluation of failures."""
    off = start()
    off.fault = lambda number, body: 500
    with pytest.raises(UserError, match="off: the last 5 requests all failed, 3 times each"):
        evaluate(config(off))


def test_a_server_that_hangs(start, config):
    """It has its time; then it is said."""
    off = start()
    off.fault = lambda number, body: "hang"
    with pytest.raises(UserError, match=r"no answer within 0.1 s\); what is finished is kept"):
        evaluate(config(off, timeout=0.1, concurrency=[8]))


@pytest.mark.parametrize("level", [1, 4])
def test_a_server_that_dies(start, config, level):
    """What was answered before is kept, and the same command does the rest, on a server that is there again."""
    off, dead = start(), threading.Event()

    def dies(number, body):
        if len(asked(off)) < 5:
            return None
        if not dead.is_set():
            dead.set()
            threading.Thread(target=off.stop).start()
        return "hang"  # nothing more is answered while it dies

    off.fault = dies
    made = config(off, concurrency=[level])
    with pytest.raises(
        UserError, match=r"no connection .*, for 1 s; what is finished is kept, the same command goes on"
    ):
        evaluate(made)
    assert not (made.out / "results.json").exists()
    [kept] = (made.out / "parts").glob("off@p@*.jsonl")
    done = len(kept.read_text().splitlines()) - 2  # the settings, and what the server says of itself
    assert 1 <= done <= 4
    off.fault = lambda number, body: None
    off.start()
    before = len(asked(off))
    evaluate(made)
    assert len(asked(off)) - before == 8 - done
    assert [request["id"] for request in results(made)["results"][0]["requests"]] == [f"r{i}" for i in range(8)]


def test_a_server_that_restarts(start, config, monkeypatch):
    """It is waited for, and the request that it lost is asked again."""
    monkeypatch.setattr(load, "PATIENCE_S", 20.0)
    off = start()

    def restart():
        off.stop()
        off.fault = lambda number, body: None
        off.start()

    def restarts(number, body):
        if len(asked(off)) == 4:
            threading.Thread(target=restart).start()
            return "hang"
        return None

    off.fault = restarts
    made = config(off)
    evaluate(made)
    found = results(made)["results"][0]
    assert found["failed"] == 0 and [r["attempts"] for r in found["requests"]] == [1, 1, 1, 2, 1, 1, 1, 1]


def test_a_server_that_comes_back_as_another(start, config, monkeypatch):
    """Figures of two kinds of server do not make one result, neither in one run nor in two."""
    off = start()

    def restarts(number, body):
        if len(asked(off)) == 4:
            off.info = off.info | {"dtype": "bfloat16"}
            return 500
        return None

    off.fault = restarts
    made = config(off)
    with pytest.raises(UserError, match="off: came back as a server with another dtype"):
        evaluate(made)
    off.fault = lambda number, body: None
    with pytest.raises(UserError, match="was begun on a server with another dtype"):
        evaluate(made)


def test_the_wrong_server_is_refused(start, config):
    """Named for what it is not, it would be measured as that."""
    plain, speculating = start(), start(**SPECULATING)
    with pytest.raises(UserError, match=r"servers.off: speculates \(EAGLE3\)"):
        evaluate(config(speculating))
    with pytest.raises(UserError, match=r"servers\.d: does not speculate"):
        evaluate(config(drafters={"d": plain}))
    with pytest.raises(UserError, match=r"servers\.d: drafts 5 steps, draft_steps is 3"):
        evaluate(config(drafters={"d": speculating}, draft_steps=3))
    trees = start(**SPECULATING, speculative_eagle_topk=4)
    with pytest.raises(UserError, match=r"servers\.d: drafts trees \(top-k 4\)"):
        evaluate(config(drafters={"d": trees}))
    tokens_alone = start(skip_tokenizer_init=True)
    with pytest.raises(UserError, match=r"servers\.off: writes no text"):
        evaluate(config(tokens_alone))
    lossy = start(version="0.5.9", stream_output=True)
    with pytest.raises(UserError, match=r"servers\.off: streams .* without --stream-output"):
        evaluate(config(lossy))
    assert not any(server.bodies for server in (plain, speculating, trees, tokens_alone, lossy))


@pytest.mark.parametrize(
    "key, value", [("version", 5), ("version", {}), ("tp_size", "x"), ("max_running_requests", "x")]
)
def test_a_server_that_says_nonsense_of_itself(start, config, key, value):
    """It is no server that can be measured; one line says why."""
    with pytest.raises(UserError, match=r"off: .*(does not tell its version|which is no number), for 1 s"):
        evaluate(config(start(**{key: value})))


def test_other_settings_are_measured_anew(start, config):
    """And what was measured before stays, for whoever goes back."""
    off = start()
    evaluate(config(off))
    evaluate(config(off, max_new_tokens=5))
    before = len(off.bodies)
    evaluate(config(off))
    assert len(off.bodies) == before


COSTS = """
gpu_hour_price: 2
gpus: 1
preparation_gpu_hours: 0
adaptation_gpu_hours: 1
idle_share: 0
requests_per_month: 1000
months: 1
concurrency: 1
"""


def test_a_decision_measures_nothing(start, config, tmp_path, run_command):
    """It is made of what is there, in three files; where nothing is, it says what to do."""
    off, drafter = start(), start(**SPECULATING)
    made = config(off, drafters={"d": drafter})
    (tmp_path / "evaluate.yaml").write_text(yaml.safe_dump(json.loads(made.model_dump_json(exclude_defaults=True))))
    (tmp_path / "costs.yaml").write_text(COSTS)
    arguments = ["--config", tmp_path / "evaluate.yaml", "--decide", tmp_path / "costs.yaml"]
    status, _, err = run_command(main, *arguments)
    assert status == 2 and "holds no results.json; measure first" in err and not off.bodies
    assert run_command(main, "--config", tmp_path / "evaluate.yaml")[0] == 0
    before = len(off.bodies)
    status, out, _ = run_command(main, *arguments)
    assert status == 0 and "# Decision sheet" in out and len(off.bodies) == before
    decision = json.loads((made.out / "decision.json").read_text())
    assert [row["arm"] for row in decision["drafters"]] == ["d"] and decision["level"] == 1
    assert (made.out / "decision.md").read_text().strip() in out
    assert "<html" in (made.out / "decision.html").read_text()
    (tmp_path / "costs.yaml").write_text(COSTS + "discount: 1\n")
    status, _, err = run_command(main, *arguments)
    assert status == 2 and "unknown key discount" in err
