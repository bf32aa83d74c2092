"""A real SGLang server on the CPU, in an environment and a process group of its own."""

import contextlib
import dataclasses
import json
import os
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from osprey_jax.command import UserError
from osprey_jax.serving.launch import PATCHES, plan_launch
from osprey_jax.serving.process import free_port, running

HERE = Path(__file__).parent
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
VENV = CACHE / "osprey-jax" / "sglang-0.5.23"
PYTHON = VENV / "bin" / "python"
STAMP = VENV / "osprey-sglang-tests"  # empty until `install.sh` is done
PACKAGES = PATCHES

START_LIMIT_S = 300  # 20 s on a quiet machine
REQUEST_LIMIT_S = 120
DRAFT_STEPS = 5

# Flags of a server on a CPU.
ARGUMENTS = ["--device", "cpu", "--prefill-attention-backend", "intel_amx", "--decode-attention-backend", "intel_amx"]
ARGUMENTS += ["--max-total-tokens", "2048", "--max-running-requests", "4"]
ARGUMENTS += ["--skip-server-warmup", "--disable-cuda-graph"]


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
    arguments = [*ARGUMENTS, "--port", str(free_port())]
    launch = plan_launch(target, draft, python=PYTHON, draft_steps=DRAFT_STEPS, arguments=arguments)
    launch = dataclasses.replace(launch, environment=environment())
    with contextlib.ExitStack() as stack:
        try:
            process = stack.enter_context(running(launch, log=log, start_timeout=START_LIMIT_S))
        except UserError as error:
            raise ServerDied(f"{error}\n{end_of(log)}") from error
        stack.callback(process.kill)  # seconds sooner than it ends by itself
        yield Server(launch.url)


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


def end_of(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-60:])
