"""`python -m export.serve` with SGLang itself: what a person who types it sees, and what is left behind."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from osprey_jax.decoding.requests import Request
from osprey_jax.decoding.speculate import speculate
from osprey_jax.serving.process import free_port
from tests.decoding.conftest import prompts
from tests.sglang.models import TAPS, shallow_target, tokenizer_rows, widened_drafter, write_drafter, write_target
from tests.sglang.server import ARGUMENTS, HERE, PACKAGES, PYTHON, STAMP, START_LIMIT_S, Server, end_of, environment

pytestmark = [
    pytest.mark.sglang,
    pytest.mark.skipif(not (STAMP.is_file() and STAMP.read_text()), reason=f"no SGLang: run {HERE / 'install.sh'}"),
]

ROOT = HERE.parents[1]
STEPS, LIMIT = 3, 32  # not the default number of steps
STOP = 7
PROMPTS = prompts((9, 30), 64)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """(target, drafter, their directory)."""
    folder = tmp_path_factory.mktemp("models")
    target = shallow_target(vocab_size=tokenizer_rows())
    drafter = widened_drafter(target, 48, noise=0.03)
    write_target(folder / "target", target, STOP)
    write_drafter(folder / "draft", drafter)
    write_drafter(folder / "broken", drafter, without="embed_tokens.weight")
    return target, drafter, folder


def command(folder: Path, draft: str, port: int) -> list[str]:
    return [
        *(sys.executable, "-m", "export.serve", "--target", str(folder / "target"), "--draft", str(folder / draft)),
        *("--python", str(PYTHON), "--draft-steps", str(STEPS), *ARGUMENTS, "--port", str(port)),
    ]


def variables() -> dict[str, str]:
    """Of a shell in which the command is typed: the stand-ins are found, our package is the command's business."""
    found = environment() | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(HERE / "shims")])}
    del found["SGLANG_EXTERNAL_MODEL_PACKAGE"]
    return found


def started_by(process: int) -> set[int]:
    """Processes in sessions that `process` began: the servers, with all that they started."""
    found = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            _, parent, _, session = path.read_text().rpartition(")")[2].split()[:4]
        except OSError:  # it has just ended
            continue
        found[int(path.parent.name)] = int(parent), int(session)
    sessions = {pid for pid, (parent, session) in found.items() if parent == process and session == pid}
    return {pid for pid, (_, session) in found.items() if session in sessions}


def lives(pid: int) -> bool:
    """Also for a moment after it was killed; one that its parent has not heard of yet does not."""
    for _ in range(50):
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return False
        except OSError:
            return False
        time.sleep(0.1)
    return True


def wait_for(pattern: str, process: subprocess.Popen, log: Path) -> re.Match:
    end = time.monotonic() + START_LIMIT_S
    while not (found := re.search(pattern, log.read_text(errors="replace"), re.MULTILINE)):
        if process.poll() is not None or time.monotonic() > end:
            pytest.fail(f"no {pattern!r}, status {process.returncode}\n{end_of(log)}")
        time.sleep(0.2)
    return found


def test_serves_until_interrupted(models, tmp_path):
    """The command, then the accepted length, then answers as of the in-process engine; after Ctrl-C nothing is left."""
    target, drafter, folder = models
    port, log = free_port(), tmp_path / "log"
    typed = command(folder, "draft", port)
    only_printed = subprocess.run([*typed, "--print"], env=variables(), capture_output=True, text=True, timeout=60)
    assert (only_printed.returncode, only_printed.stderr) == (0, "")
    assert f"PYTHONPATH={PACKAGES}" in only_printed.stdout and f"--speculative-num-steps {STEPS}" in only_printed.stdout

    with log.open("wb") as output:
        process = subprocess.Popen(typed, env=variables(), stdout=output, stderr=output, start_new_session=True)
    try:
        up = wait_for(r"^up: (http://\S+); on a first request .* accepted length (\d\.\d\d) \(", process, log)
        assert log.read_text(errors="replace").startswith(only_printed.stdout)
        assert up[1] == f"http://127.0.0.1:{port}" and float(up[2]) > 1.5
        requests = [Request(prompt, LIMIT) for prompt in PROMPTS]
        engine = speculate(target, drafter, requests, tap_layers=TAPS, draft_steps=STEPS, stop_ids=(STOP,))
        for request, wanted in zip(requests, engine, strict=True):
            answer = Server(up[1]).generate(request.prompt, LIMIT)
            assert answer["output_ids"] == wanted.completion.token_ids
            assert answer["meta_info"]["spec_verify_ct"] == wanted.verifications
        servers = started_by(process.pid)
        assert len(servers) > 1, "SGLang has processes of its own"
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130
    finally:
        process.kill()
        for pid in started_by(process.pid):
            os.kill(pid, signal.SIGKILL)
    left = {pid for pid in servers if lives(pid)}
    assert not left, f"{left} of {servers} are left\n{end_of(log)}"
    assert log.read_text(errors="replace").endswith("error: interrupted; run the same command again to go on\n")
    assert not re.search("Traceback|crashed", log.read_text(errors="replace").rpartition("accepted length")[2])


def test_print_starts_nothing(models, tmp_path):
    """It is there to be copied into a script of one's own; SGLang's Python is only asked for its version."""
    python, called = tmp_path / "python", tmp_path / "called"
    python.write_text(f'#!/bin/sh\necho "$*" >>{called}\nexec {PYTHON} "$@"\n')
    python.chmod(0o755)
    typed = [*command(models[2], "draft", free_port()), "--print", "--python", str(python)]
    done = subprocess.run(typed, env=variables(), capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    (line,) = done.stdout.splitlines()
    assert f"{python} -m sglang.launch_server --model-path {models[2] / 'target'} " in line
    assert called.read_text().startswith("-c ") and "launch_server" not in called.read_text()


def test_broken_export(models, tmp_path):
    """SGLang's own words stand above the one line that says it ended; nobody waits half an hour for a health check."""
    log = tmp_path / "log"
    with log.open("wb") as output:
        typed = command(models[2], "broken", free_port())
        done = subprocess.run(typed, env=variables(), stdout=output, stderr=output, timeout=START_LIMIT_S)
    lines = log.read_text(errors="replace").splitlines()
    assert done.returncode == 2, end_of(log)
    assert any("broken: missing embed_tokens.weight; " in line for line in lines)
    ours = [line for line in lines if line.startswith("error: ")]
    assert ours == lines[-1:] and re.fullmatch(r"error: the server ended with status -?\d+ .*stands above", ours[0])
