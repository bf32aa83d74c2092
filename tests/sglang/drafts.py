"""Drafts in directories of their own, what SGLang's classes make of them, and what ours does."""

import json
import os
import socket
import subprocess
from pathlib import Path

import jax.numpy as jnp
import numpy as np

from osprey_jax.decoding.cache import cached_attend, layer_caches
from osprey_jax.models.drafter import Drafter
from tests.sglang.models import write_drafter
from tests.sglang.server import HERE, PACKAGES, VENV, environment

RELEASES = {"0.5.9": VENV / "sglang-0.5.9", "0.5.23": VENV / "lib" / "python3.11" / "site-packages"}
TOKENS, MORE = 7, 3  # read at once; then read one by one


def write_draft(out: Path, drafter: Drafter, *, without: str | None = None, **inputs) -> Path:
    """A checkpoint and the inputs that `draft_logits.py` gives it, random ones but for those in `inputs`."""
    write_drafter(out, drafter, without=without)
    rng, vocab = np.random.default_rng(8), drafter.config.transformer.vocab_size
    random = {
        "token_ids": rng.integers(0, vocab, TOKENS),
        "features": rng.standard_normal((TOKENS, 3 * drafter.config.target_hidden_size), np.float32),
        "more": rng.integers(0, vocab, MORE),
    }
    np.savez(out / "inputs.npz", **random | inputs)
    return out


def change_config(draft: Path, *, remove: str | None = None, **changes) -> Path:
    path = draft / "config.json"
    config = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in config.items() if key != remove}))
    return draft


def served(drafts: list[Path], out: Path, *paths: Path, package: str | None = None, ranks: int = 1):
    """([what `draft_logits.py` found for each draft], its log), with `paths` first where Python looks for modules."""
    out.mkdir()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    cores = sorted(os.sched_getaffinity(0))
    variables = environment() | {
        "PYTHONPATH": os.pathsep.join(map(str, [HERE / "shims", *paths])),
        "SGLANG_CPU_OMP_THREADS_BIND": "|".join(str(cores[rank % len(cores)]) for rank in range(ranks)),
    }
    del variables["SGLANG_EXTERNAL_MODEL_PACKAGE"]
    if package is not None:
        variables["SGLANG_EXTERNAL_MODEL_PACKAGE"] = package
    program = [str(VENV / "bin" / "python"), str(HERE / "draft_logits.py"), str(out)]
    running = []
    try:
        for rank in range(ranks):
            with (out / f"log.{rank}").open("wb") as log:
                command = [*program, str(rank), str(ranks), str(port), *map(str, drafts)]
                running.append(subprocess.Popen(command, env=variables, stdout=log, stderr=log))
        statuses = [process.wait(timeout=300) for process in running]
    finally:
        for process in running:
            process.kill()
            process.wait()
    log = (out / "log.0").read_text(errors="replace")
    assert not any(statuses), log
    return [dict(np.load(out / f"{draft.name}.npz")) for draft in drafts], log


def external(version: str) -> dict:
    """`served`'s arguments for the external package on a release as it is."""
    return {"paths": (RELEASES[version], PACKAGES), "package": "osprey_sgl_models"}


def reference(drafter: Drafter, draft: Path) -> dict[str, np.ndarray]:
    """`logits` and `streams` of this project's own forward on the same inputs."""
    given = np.load(draft / "inputs.npz")
    cache = layer_caches(drafter.config.transformer, 1, TOKENS + MORE, jnp.float32)
    feature_1xSxH = drafter.project(jnp.asarray(given["features"])[None])
    steps = [given["token_ids"], *given["more"][:, None]]
    logits, streams, position = [], [], 0
    for token_ids in steps:
        positions_1xS = position + jnp.arange(len(token_ids))[None]
        embedding_1xSxH = drafter.embed_tokens(jnp.asarray(token_ids)[None], jnp.float32)
        stream_1xSxH, cache = drafter(
            embedding_1xSxH, feature_1xSxH, positions_1xS, cached_attend(positions_1xS), cache
        )
        logits.append(drafter.logits(stream_1xSxH)[0, -1:])
        streams.append(stream_1xSxH[0])
        feature_1xSxH = stream_1xSxH[:, -1:]
        position += len(token_ids)
    return {"logits": np.concatenate(logits), "streams": np.concatenate(streams)}
