"""A server's life: waited for, its end explained, nothing of it left."""

import json
import os
import socket
import threading
import time
from pathlib import Path

import pytest

from osprey_jax.command import UserError
from osprey_jax.serving import process as module
from osprey_jax.serving.launch import Launch
from osprey_jax.serving.process import free_port, running
from tests.serving.fake_environment import fake_python


@pytest.fixture
def launch(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_POLL_S", 0.05)

    def make(behaviour="serves", port=None):
        port = port or free_port()
        command = [str(fake_python(tmp_path, behaviour)), "-m", "sglang.launch_server", "--port", str(port)]
        return Launch(command, {"PYTHONPATH": "there"}, f"http://127.0.0.1:{port}", None)

    return make


def gone(pid):
    for _ in range(200):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        if b"\nState:\tZ" in Path(f"/proc/{pid}/status").read_bytes():  # the machine's init may be slow to reap it
            return True
        time.sleep(0.05)
    return False


def test_it_is_there_within_the_block_alone(launch, tmp_path):
    """With its environment, its output in the log; after it, no process is left, a child's neither."""
    with running(launch("starts_late"), log=tmp_path / "log", start_timeout=60) as process:
        assert module._answers(f"http://127.0.0.1:{process.args[-1]}")
        seen = json.loads((tmp_path / "seen.json").read_text())
        assert seen["environment"]["PYTHONPATH"] == "there"
    assert gone(seen["pid"]) and gone(seen["child"])
    assert (tmp_path / "log").read_text().startswith("loading")


def test_one_that_does_not_want_to_go(launch, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_END_S", 0.3)
    with running(launch("stubborn"), log=tmp_path / "log", start_timeout=60):
        seen = json.loads((tmp_path / "seen.json").read_text())
    assert gone(seen["pid"]) and gone(seen["child"])


def test_one_that_dies_says_why(launch, tmp_path):
    """The last error in its log is the reason, whatever stands after it; its children go too."""
    wanted = r"ended with status 3 before it answered: ValueError: draft model x: missing embed_tokens.weight"
    with (
        pytest.raises(UserError, match=wanted),
        running(launch("dies"), log=tmp_path / "log", start_timeout=60),
    ):
        pass
    assert gone(json.loads((tmp_path / "seen.json").read_text())["child"])


def test_one_that_does_not_come_up(launch, tmp_path):
    with (
        pytest.raises(UserError, match=r"no answer within 1\.5 s: loading"),
        running(launch("hangs_at_start"), log=tmp_path / "log", start_timeout=1.5),
    ):
        pass
    assert gone(json.loads((tmp_path / "seen.json").read_text())["pid"])


def test_a_port_that_is_taken(launch, tmp_path):
    """The other server would be measured for this one."""
    with running(launch("serves"), log=tmp_path / "log", start_timeout=60) as process:
        port = int(process.args[-1])
        with (
            pytest.raises(UserError, match="another server answers there already"),
            running(launch("serves", port), log=tmp_path / "second", start_timeout=60),
        ):
            pass
        assert not (tmp_path / "second").exists()


@pytest.mark.parametrize("words", [b"SSH-2.0-OpenSSH_9.6\r\n", b"HTTP/1.1 503 Service Unavailable\r\n\r\n"])
def test_a_port_where_something_else_speaks(words):
    """Or a server that is not ready: it does not answer, and nothing ends for it."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def speak():
            connection, _ = listening.accept()
            with connection:
                connection.recv(4096)
                connection.sendall(words)

        threading.Thread(target=speak, daemon=True).start()
        assert not module._answers(f"http://127.0.0.1:{listening.getsockname()[1]}")
