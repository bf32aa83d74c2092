"""`export.serve` around a server that is not SGLang; with the real one in tests/sglang."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from osprey_jax.serving.process import free_port
from tests.conftest import GOLDEN
from tests.serving.fake_environment import ROOT, fake_python

MODELS = ["--target", str(GOLDEN / "qwen3/target"), "--draft", str(GOLDEN / "qwen3/expected/converted")]


@pytest.fixture
def serve(tmp_path):
    """Starts the command; its output comes as text."""
    started = []

    def call(behaviour, *arguments):
        python = fake_python(tmp_path, behaviour)
        command = [sys.executable, "-u", "-m", "export.serve", *MODELS, "--python", str(python), *arguments]
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        # As from a terminal, also where these tests run under `nohup`, which the command would heed.
        before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
        started.append(subprocess.Popen(command, cwd=ROOT, env=environment, **streams))
        signal.signal(signal.SIGHUP, before)
        return started[-1]

    yield call
    for process in started:
        process.terminate()  # with its server
        process.communicate(timeout=60)


def line_with(process, text):
    for line in process.stdout:
        if text in line:
            return line
    pytest.fail(f"no {text!r}; {process.stderr.read()}")


@pytest.mark.parametrize("number, status", [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_it_reports_and_ends_with_its_server(serve, tmp_path, number, status):
    """The command first, then what was accepted; a signal ends the server and its children too."""
    port = free_port()
    process = serve("serves", "--port", str(port), "--tp", "2")
    assert f"sglang.launch_server --model-path {MODELS[1]}" in line_with(process, "--tp 2")
    up = line_with(process, "up: ")
    assert f"http://127.0.0.1:{port}" in up and "accepted length" in up and "verifications" in up
    process.send_signal(number)
    assert process.wait(60) == status
    child = json.loads((tmp_path / "seen.json").read_text())["child"]
    time.sleep(0.2)
    state = Path(f"/proc/{child}/status")
    assert not state.exists() or "Z (zombie)" in state.read_text()


def test_print_only_prints(serve, tmp_path):
    process = serve("serves", "--print", "--draft-steps", "3")
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 0 and len(out.splitlines()) == 1 and "--speculative-num-steps 3" in out
    assert not (tmp_path / "seen.json").exists()


def test_a_server_that_dies(serve):
    """One line, behind the server's own words."""
    process = serve("dies", "--port", str(free_port()))
    _, err = process.communicate(timeout=60)
    assert process.returncode == 2
    assert err.splitlines()[-1] == "error: the server ended with status 3 before it answered; its output stands above"


def test_a_server_that_dies_when_asked(serve):
    """Of one that was up, nobody is told that it is."""
    process = serve("dies_when_asked", "--port", str(free_port()))
    _, err = process.communicate(timeout=60)
    assert process.returncode == 2 and err.splitlines()[-1] == (
        "error: the server ended with status 3 at its first request"
    )


def test_a_server_that_drafts_nothing(serve):
    """Up, and of no use."""
    process = serve("no_speculation", "--port", str(free_port()))
    _, err = process.communicate(timeout=60)
    assert process.returncode == 2 and "answered without speculation" in err


def test_a_server_that_answers_nonsense(serve):
    """One line, and it is ended."""
    process = serve("nonsense", "--port", str(free_port()))
    _, err = process.communicate(timeout=60)
    assert process.returncode == 2
    assert "/generate: is up, but does not answer a first request" in err.splitlines()[-1]


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--draft-steps", "0"], "--draft-steps: 0 is not at least 1"),
        (["--model-path", "x"], "--model-path: is set here"),
    ],
)
def test_wrong_options(serve, arguments, message):
    process = serve("serves", *arguments)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 2 and message in err and len(err.splitlines()) == 1
