"""A server of our own: started, watched until it answers, ended with all its children."""

import contextlib
import http.client
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from osprey_jax.command import UserError
from osprey_jax.serving.launch import Launch

_POLL_S = 1.0
_END_S = 20.0  # that a server may take to end by itself


@contextlib.contextmanager
def running(launch: Launch, *, log: Path | None, start_timeout: float) -> Iterator[subprocess.Popen]:
    """A server that answers while the block runs. Its output goes to `log`, or where ours goes.

    Raises:
      UserError: it ended, or did not answer within `start_timeout` seconds.
    """
    if _answers(launch.url):
        raise UserError(f"{launch.url}: another server answers there already; stop it or choose another --port")
    with contextlib.nullcontext() if log is None else log.open("wb") as output:
        process = _start(launch, output)
        hangup = signal.getsignal(signal.SIGHUP)
        try:
            if hangup == signal.SIG_DFL:  # of a closed terminal, which the server does not hear
                signal.signal(signal.SIGHUP, lambda *_: sys.exit(129))
            _wait(process, launch.url, log, start_timeout)
            yield process
        finally:
            _end(process)
            signal.signal(signal.SIGHUP, hangup)


def free_port() -> int:
    """One that nobody has on this machine, now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _start(launch: Launch, output: IO[bytes] | None) -> subprocess.Popen:
    # A session of its own: a server that fails kills its process group, and Ctrl-C should reach it through us.
    return subprocess.Popen(
        launch.command,
        env=os.environ | launch.environment,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=None if output is None else subprocess.STDOUT,
        start_new_session=True,
    )


def _wait(process: subprocess.Popen, url: str, log: Path | None, limit: float) -> None:
    end = time.monotonic() + limit
    while not _answers(url):
        if process.poll() is not None:
            raise UserError(f"the server ended with status {process.returncode} before it answered{_last_words(log)}")
        if time.monotonic() > end:
            raise UserError(f"{url}: no answer within {limit:g} s{_last_words(log)}")
        time.sleep(_POLL_S)


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=10):
            return True
    except (OSError, ValueError, http.client.HTTPException):  # a server that is not ready says 503, an OSError here
        return False


def _last_words(log: Path | None) -> str:
    """What a log says last of an error, in one line."""
    if log is None:
        return "; its output stands above"
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    errors = [line.strip() for line in lines if "Error: " in line] or [line.strip() for line in lines if line.strip()]
    return f": {errors[-1][:500] if errors else 'it said nothing'} ({log})"


def _end(process: subprocess.Popen) -> None:
    """SIGTERM to the server alone, which then answers what it was asked and ends its children; kill what is left.

    Sent to its children too, SGLang takes it for their crash.
    """
    process.terminate()
    try:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_END_S)
    finally:  # also at a second Ctrl-C
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
