"""`evaluate` behind SGLang servers that it starts itself, against the same measurement in this process."""

import contextlib
import json
import os
import shutil
import signal
import threading
import time

import numpy as np
import pytest
import yaml

from osprey_jax import evaluate
from osprey_jax.command import UserError
from osprey_jax.config import OFF, EvaluateConfig
from osprey_jax.data.tokenizer import load_tokenizer
from osprey_jax.evaluation import behind_servers
from osprey_jax.reports.statistics import TIMES
from tests.conftest import GOLDEN
from tests.sglang.models import shallow_target, tokenizer_rows, widened_drafter, write_drafter, write_target
from tests.sglang.server import ARGUMENTS, DRAFT_STEPS, HERE, PYTHON, STAMP, environment, serve

pytestmark = [
    pytest.mark.sglang,
    pytest.mark.skipif(not (STAMP.is_file() and STAMP.read_text()), reason=f"no SGLang: run {HERE / 'install.sh'}"),
]

LEVELS = [1, 3]
TEXTS = ["The license", "all of the work", "software", "of it", "free software " * 4, "You may"]
TURNS = [["The license", "of it"], ["software is", "free"]]
COSTS = {
    "gpu_hour_price": 2.5,
    "gpus": 1,
    "preparation_gpu_hours": 10,
    "adaptation_gpu_hours": {"wide": 4, "narrow": 2},
    "idle_share": 0.3,
    "requests_per_month": 1e6,
    "months": 6,
    "concurrency": 3,
    "limits": {"min_share_equal_to_off": 1.0, "max_failure_share": 0.0},
}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    """What both engines are given. The target writes any bytes, also such as are no text."""
    folder = tmp_path_factory.mktemp("inputs")
    tokenizer = load_tokenizer(GOLDEN / "qwen3" / "target")
    target = shallow_target(vocab_size=tokenizer_rows())
    write_target(folder / "target", target, tokenizer.eos_token_id)
    write_drafter(folder / "wide", widened_drafter(target, 48, noise=0.03))
    write_drafter(folder / "narrow", widened_drafter(target, 32, noise=0.1))
    records = [{"id": f"r{i}", "conversations": [{"role": "user", "content": text}]} for i, text in enumerate(TEXTS)]
    questions = [{"question_id": 81 + i, "category": "writing", "turns": turns} for i, turns in enumerate(TURNS)]
    for name, lines in (("prompts", records), ("mt_bench", questions)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return {
        "target": folder / "target",
        "drafters": {name: folder / name for name in ("wide", "narrow")},
        "prompts": {name: folder / f"{name}.jsonl" for name in ("prompts", "mt_bench")},
        "max_new_tokens": 32,
        "draft_steps": DRAFT_STEPS,
    }


@pytest.fixture(autouse=True)
def _on_a_cpu(monkeypatch):
    for name, value in environment().items():
        monkeypatch.setenv(name, value)


def behind(inputs, out, **changes) -> EvaluateConfig:
    started = {"sglang_python": PYTHON, "sglang_arguments": ARGUMENTS, "concurrency": LEVELS, "start_timeout": 300}
    return EvaluateConfig(**inputs | {"engine": "sglang", "out": out} | started | changes)


def measure(config: EvaluateConfig) -> list[dict]:
    """The results with their requests; what the servers said where one does not come up."""
    try:
        evaluate.evaluate(config)
    except UserError as error:
        logs = [f"{path}:\n{path.read_text(errors='replace')[-3000:]}" for path in config.out.glob("servers/*.log")]
        raise UserError("\n".join([str(error), *logs])) from error
    return json.loads((config.out / "results.json").read_text())["results"]


def said(results: list[dict], *, times: bool = False) -> dict[tuple, dict]:
    """{(arm, set, level, id, turn): what is known of the request}, `times` apart. No request may be there twice."""
    found = {}
    for result in results:
        assert not result["failures"]
        for request in result["requests"]:
            key = *(result[name] for name in ("arm", "prompts", "concurrency")), request["id"], request["turn"]
            assert key not in found
            left_out = () if times else (*TIMES, "decode_tokens_per_second", "lost_seconds")
            found[key] = {name: value for name, value in request.items() if name not in left_out}
            if (histogram := request["histogram"]) is not None:  # SGLang leaves out zeros at the end
                found[key]["histogram"] = histogram + [0] * (DRAFT_STEPS + 1 - len(histogram))
    return found


@pytest.fixture(scope="module")
def measured(inputs, tmp_path_factory):
    """(the directory that all arms were measured in behind servers, the results)."""
    out = tmp_path_factory.mktemp("behind") / "out"
    with pytest.MonkeyPatch.context() as monkeypatch:
        for name, value in environment().items():
            monkeypatch.setenv(name, value)
        return out, measure(behind(inputs, out))


def test_requests_are_those_of_this_process(inputs, measured, tmp_path):
    """Greedy: tokens, text, verifications and histograms, request by request, at every level, in every turn."""
    here = said(measure(EvaluateConfig(**inputs, out=tmp_path / "out")))
    there = said(measured[1])
    per_arm = len(TEXTS) + sum(map(len, TURNS))
    assert len(here) == 2 * per_arm and len(there) == 3 * len(LEVELS) * per_arm
    for (arm, prompts, level, *item), request in there.items():
        if arm == OFF:
            assert (request["verifications"], request["histogram"], request["matches_off"]) == (None, None, None)
            same = here["wide", prompts, None, *item]
            for name in ("prompt_tokens", "completion_tokens", "finish_reason", "text"):
                assert request[name] == same[name], (arm, prompts, level, *item)
        else:
            assert request == here[arm, prompts, None, *item], (arm, prompts, level, *item)
            assert request["matches_off"] is True
    length = lambda arm: np.mean([r["accepted_length"] for (a, *_), r in here.items() if a == arm])
    assert length("wide") > 2 and length("wide") > length("narrow") + 0.3, "shows nothing"


def test_times_and_servers_are_told(measured):
    """Numbers that a person decides on: none without a time, and from which servers."""
    out, results = measured
    for request in said(results, times=True).values():
        assert 0 < request["time_to_first_token"] <= request["seconds"]
        assert request["attempts"] == 1 and request["lost_seconds"] < 1e-5
    for result in results:
        whole = sum(request["seconds"] for request in result["requests"])
        if result["concurrency"] == 1:
            assert result["busy_seconds"] == pytest.approx(whole, rel=1e-3)
        else:
            assert result["busy_seconds"] < whole
    servers = json.loads((out / "results.json").read_text())["hardware"]["servers"]
    assert {arm: server.get("speculative_num_steps") for arm, server in servers.items()} == {
        OFF: None,
        "wide": DRAFT_STEPS,
        "narrow": DRAFT_STEPS,
    }
    assert {server["version"] for server in servers.values()} == {"0.5.23"}


def test_second_run_measures_nothing(inputs, measured, monkeypatch):
    """What is there is not paid for again, and stays what it was to the last digit."""
    out, results = measured

    def start(*arguments, **options):
        raise AssertionError("a server was started")

    monkeypatch.setattr(behind_servers, "running", start)
    assert measure(behind(inputs, out)) == results


def test_server_killed_half_way(inputs, measured, monkeypatch, tmp_path):
    """One line; what was answered stays; the same command goes on, and counts no request twice."""
    shutil.copytree(measured[0], tmp_path / "out")
    config = behind(inputs, tmp_path / "out")
    parts = tmp_path / "out" / "parts"
    for path in parts.glob("wide@*"):
        path.unlink()
    entries = lambda: [line for path in sorted(parts.glob("wide@*")) for line in path.read_bytes().splitlines(True)]

    started, original = [], behind_servers.running

    @contextlib.contextmanager
    def running(launch, **options):
        with original(launch, **options) as process:
            started.append(process)
            yield process

    def kill():
        while not started or sum(b'"turn"' in entry for entry in entries()) < 2:
            time.sleep(0.01)
        os.killpg(started[0].pid, signal.SIGKILL)

    monkeypatch.setattr(behind_servers, "running", running)
    threading.Thread(target=kill, daemon=True).start()
    with pytest.raises(
        UserError, match=r"^wide: the server ended with status -9 .*; what is finished is kept"
    ) as caught:
        evaluate.evaluate(config)
    assert "\n" not in str(caught.value)
    kept = entries()
    assert 2 <= sum(b'"turn"' in entry for entry in kept) < len(LEVELS) * len(TEXTS)

    results = measure(config)
    assert len(started) == 2, "one more server, for the drafter that was not finished"
    assert set(kept) <= set(entries())
    assert said(results) == said(measured[1])


def test_running_servers(inputs, measured, tmp_path):
    """The same figures as of those started here. One that is not what it is named is refused before it is measured."""
    draft = inputs["drafters"]["wide"]
    common = inputs | {"engine": "sglang", "drafters": {"wide": draft}, "concurrency": LEVELS}
    with (
        serve(inputs["target"], None, tmp_path / "off.log") as off,
        serve(inputs["target"], draft, tmp_path / "wide.log") as wide,
    ):
        for servers, reason in (
            ({OFF: wide.url, "wide": off.url}, r"^servers.off: speculates \(EAGLE3\); start one without$"),
            ({"wide": off.url}, r"^servers.wide: does not speculate; start it with `python -m export.serve`$"),
            ({"wide": wide.url}, r"^servers.wide: drafts 5 steps, draft_steps is 4$"),
        ):
            wrong = {"servers": servers, "out": tmp_path / "refused"}
            wrong |= {"draft_steps": 4} if servers == {"wide": wide.url} else {}
            with pytest.raises(UserError, match=reason):
                evaluate.evaluate(EvaluateConfig(**common | wrong))
        right = EvaluateConfig(**common, servers={OFF: off.url, "wide": wide.url}, out=tmp_path / "out")
        found = said(measure(right))
    assert found == {key: value for key, value in said(measured[1]).items() if key[0] != "narrow"}


def test_decision_on_what_was_measured(inputs, measured, run_command, tmp_path):
    """From real results to the pages, with nothing measured again and nothing filled in by hand."""
    shutil.copytree(measured[0], tmp_path / "out")
    config = behind(inputs, tmp_path / "out").model_dump(mode="json", exclude_unset=True)
    for name, value in (("evaluate", config), ("costs", COSTS)):
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(value))
    files = ("--config", tmp_path / "evaluate.yaml", "--decide", tmp_path / "costs.yaml")
    status, printed, errors = run_command(evaluate.main, *files)
    assert status == 0, errors
    page = (tmp_path / "out" / "decision.md").read_text()
    assert page in printed and "0.5.23" in page
    assert "<html" in (tmp_path / "out" / "decision.html").read_text()
    made = json.loads((tmp_path / "out" / "decision.json").read_text())
    for arm in (OFF, "wide", "narrow"):
        assert arm in json.dumps(made) and arm in page
