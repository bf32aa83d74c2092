"""A real SGLang server on the CPU, in an environment and a process group of its own."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).parent
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
VENV = CACHE / "osprey-jax" / "sglang-0.5.23"
STAMP = VENV / "osprey-sglang-tests"  # empty until `install.sh` is done
PACKAGES = HERE.parents[1] / "sglang_patches"

START_LIMIT_S = 300  # 20 s on a quiet machine
REQUEST_LIMIT_S = 120
DRAFT_STEPS = 5


class ServerDied(Exception):
    """The server ended, or did not answer in time; the message ends with the end of its log."""


class Server:
    """A server that answers."""

    def __init__(self, url: str):
        self.url = url

    def generate(self, prompt: list[int], limit: int) -> dict:
        """`output_ids` and `meta_info` of a greedy completion of at most `limit` tokens."""
        body = {"input_ids": prompt, "sampling_params": {"temperature": 0, "max_new_tokens": limit}}
        request = urllib.request.Request(
            f"{self.url}/generate", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=REQUEST_LIMIT_S) as response:
            return json.load(response)


@contextlib.contextmanager
def serve(target: Path, draft: Path | None, log: Path) -> Iterator[Server]:
    """Serve `target`, with `draft` if there is one, while the block runs.

    Raises:
      ServerDied: before it answered.
    """
    port = _free_port()
    command = [
        str(VENV / "bin" / "python"),
        *("-m", "sglang.launch_server", "--model-path", str(target)),
        *("--device", "cpu", "--dtype", "float32", "--host", "127.0.0.1", "--port", str(port)),
        *("--prefill-attention-backend", "intel_amx", "--decode-attention-backend", "intel_amx"),
        *("--max-total-tokens", "2048", "--max-running-requests", "4"),
        *("--skip-server-warmup", "--disable-cuda-graph"),
    ]
    if draft is not None:
        command += [
            *("--speculative-algorithm", "EAGLE3", "--speculative-draft-model-path", str(draft)),
            *("--speculative-num-steps", str(DRAFT_STEPS), "--speculative-eagle-topk", "1"),
            *("--speculative-num-draft-tokens", str(DRAFT_STEPS + 1)),
        ]
    with log.open("wb") as output:
        # A session of its own: when the server fails it kills its process group, which would be ours.
        process = subprocess.Popen(
            command, env=environment(), stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
        )
    try:
        url = f"http://127.0.0.1:{port}"
        _wait_until_healthy(process, url, log)
        yield Server(url)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def environment() -> dict[str, str]:
    """Variables under which SGLang finds the stand-ins and our package, and runs on a CPU."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "XLA", "JAX"))}
    return kept | {
        "PYTHONPATH": os.pathsep.join([str(HERE / "shims"), str(PACKAGES)]),
        "PYTHONDONTWRITEBYTECODE": "1",
        "SGLANG_EXTERNAL_MODEL_PACKAGE": "osprey_sgl_models",
        "SGLANG_USE_CPU_ENGINE": "1",
        "SGLANG_CPU_OMP_THREADS_BIND": "1",
        "OMP_NUM_THREADS": "1",
        "TORCHDYNAMO_DISABLE": "1",
        "HF_HUB_OFFLINE": "1",
    }


def _wait_until_healthy(process: subprocess.Popen, url: str, log: Path) -> None:
    end = time.monotonic() + START_LIMIT_S
    while time.monotonic() < end:
        if process.poll() is not None:
            raise ServerDied(f"the server ended with status {process.returncode}\n{_end_of(log)}")
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/health", timeout=10):
            return
        time.sleep(0.5)
    raise ServerDied(f"no answer within {START_LIMIT_S} s\n{_end_of(log)}")


def _end_of(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-60:])


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
