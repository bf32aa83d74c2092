"""Serve a target in SGLang with a drafter that proposes: the command, its environment, and whether it works.

python -m export.serve --target DIR --draft DIR [--print] [flags of sglang.launch_server ...]

Prints what it runs, waits until the server answers, asks it something, and says which accepted length that had. Ends
with the server, and ends the server at Ctrl-C. What SGLang needs to know is in sglang_patches/README.md.
"""

import argparse
import contextlib
import http.client
import json
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

from osprey_jax.command import ArgumentParser, UserError, run
from osprey_jax.serving.launch import Launch, plan_launch
from osprey_jax.serving.process import running

_PROBE = {"text": "Write a list of the numbers from one to twenty, in words:\n1. one\n2. two\n3."}
_PROBE_TOKENS = 64
_PROBE_LIMIT_S = 300
_REPORT_S = 60.0
_END_S = 2.0  # that a server which broke off an answer may take to end


def serve(launch: Launch, start_timeout: float) -> int:
    """Run the server until it ends; its exit status. Raises `UserError` where it does not come up or not answer."""
    with running(launch, log=None, start_timeout=start_timeout) as process:
        try:
            found = _probe(launch)
        except UserError:
            with contextlib.suppress(subprocess.TimeoutExpired):  # it may not be up any more
                raise UserError(f"the server ended with status {process.wait(_END_S)} at its first request") from None
            raise
        print(f"up: {launch.url}; on a first request of {_PROBE_TOKENS} tokens, {found}", flush=True)
        reported = None
        while True:
            try:
                return process.wait(_REPORT_S)
            except subprocess.TimeoutExpired:
                if (found := _average(launch)) not in (None, reported):
                    print(f"accepted length since the start: {found:.2f}", flush=True)
                    reported = found


def _probe(launch: Launch) -> str:
    """Asks for something greedy and says what the drafter did."""
    body = _PROBE | {"sampling_params": {"temperature": 0, "max_new_tokens": _PROBE_TOKENS, "ignore_eos": True}}
    url = f"{launch.url}/generate"
    try:
        with urllib.request.urlopen(_request(launch, url, body), timeout=_PROBE_LIMIT_S) as response:
            meta = json.load(response)["meta_info"]
            tokens, verifications = int(meta["completion_tokens"]), int(meta.get("spec_verify_ct") or 0)
    except (
        OSError,
        http.client.HTTPException,
        ArithmeticError,
        ValueError,
        LookupError,
        TypeError,
        AttributeError,
    ) as error:
        raise UserError(f"{url}: is up, but does not answer a first request ({error})") from error
    if not verifications:
        raise UserError(f"{url}: answered without speculation; nothing drafted")
    return f"accepted length {tokens / verifications:.2f} ({tokens} tokens, {verifications} verifications)"


def _average(launch: Launch) -> float | None:
    try:
        with urllib.request.urlopen(_request(launch, f"{launch.url}/server_info"), timeout=10) as response:
            return float(json.load(response)["internal_states"][0]["avg_spec_accept_length"])
    except (OSError, http.client.HTTPException, ValueError, LookupError, TypeError):
        return None  # busy, or about to end


def _request(launch: Launch, url: str, body: Any = None) -> urllib.request.Request:
    headers = {"Content-Type": "application/json"}
    if launch.api_key:
        headers["Authorization"] = f"Bearer {launch.api_key}"
    return urllib.request.Request(url, None if body is None else json.dumps(body).encode(), headers)


def main() -> None:
    parser = ArgumentParser(
        prog="python -m export.serve", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", type=Path, required=True, metavar="DIR", help="the target's checkpoint")
    parser.add_argument("--draft", type=Path, required=True, metavar="DIR", help="what export.to_sglang wrote")
    parser.add_argument(
        "--python",
        type=Path,
        default=Path(sys.executable),
        metavar="FILE",
        help="the Python of the environment with SGLang (default: this one)",
    )
    parser.add_argument("--draft-steps", type=int, default=5, metavar="N", help="tokens drafted a verification (5)")
    parser.add_argument(
        "--start-timeout", type=float, default=1800.0, metavar="S", help="seconds until it must answer (1800)"
    )
    parser.add_argument("--print", action="store_true", help="only print the command")
    arguments, passed = parser.parse_known_args()
    if arguments.draft_steps < 1:
        raise UserError(f"--draft-steps: {arguments.draft_steps} is not at least 1")
    passed = [item for item in passed if item != "--"]
    launch = plan_launch(
        arguments.target,
        arguments.draft,
        python=arguments.python,
        draft_steps=arguments.draft_steps,
        arguments=passed,
    )
    print(launch, flush=True)
    if not arguments.print:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        status = serve(launch, arguments.start_timeout)
        raise UserError(f"the server ended with status {status}")


if __name__ == "__main__":
    run(main)
