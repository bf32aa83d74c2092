"""The command and the environment that serve a target in SGLang, with a drafter or without."""

import dataclasses
import itertools
import os
import shlex
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from osprey_jax.command import UserError
from osprey_jax.files import read_json, require_directory

PATCHES = Path(__file__).resolve().parents[2] / "sglang_patches"
PACKAGE = "osprey_sgl_models"
PACKAGE_VARIABLE = "SGLANG_EXTERNAL_MODEL_PACKAGE"
VERSIONS = ("0.5.23", "0.5.9")  # of SGLang that the package is written for

# Flags of what this module decides: another value would serve something else than was asked for.
_OURS = ("--model-path", "--model", "--speculative-draft-model-path", "--speculative-draft-model")
_OURS += ("--speculative-algorithm", "--speculative-algo", "--speculative-eagle-topk")


@dataclasses.dataclass(frozen=True)
class Launch:
    """How a server is started. `environment` are the variables that it needs beside those that are set."""

    command: list[str]
    environment: dict[str, str]
    url: str
    api_key: str | None  # that requests must carry

    def __str__(self) -> str:
        """What a shell would be told."""
        settings = [f"{name}={shlex.quote(value)}" for name, value in self.environment.items()]
        return " ".join([*settings, shlex.join(self.command)])


def plan_launch(
    target: Path, drafter: Path | None, *, python: Path, draft_steps: int, arguments: Sequence[str]
) -> Launch:
    """How to serve `target`, with `drafter` where there is one.

    Args:
      python: the interpreter of an environment with SGLang.
      draft_steps: tokens drafted before each verification, unless `arguments` say so.
      arguments: further flags of `sglang.launch_server`.

    Raises:
      UserError: no SGLang there, or of a version that is not supported; a drafter of another target; flags that
        contradict what is asked for.
    """
    given = _flags(arguments)
    if wrong := [flag for flag in _OURS if flag in given]:
        raise UserError(f"{', '.join(wrong)}: is set here, by the target and the drafter that are named")
    installed_version(python)
    raw = read_json(require_directory(target, "the target, a Hugging Face checkpoint") / "config.json")
    flags, environment = ["--model-path", str(target)], {}
    if not {"--dtype"} & given.keys():
        # Exports are float32, of which SGLang would make float16 beside a bfloat16 target.
        flags += ["--dtype", str(raw.get("dtype") or raw.get("torch_dtype") or "bfloat16")]
    if drafter is not None:
        _check_drafter(drafter, raw.get("text_config", raw), given)  # one that also sees has two configs
        environment = _know_drafters()
        steps = _number(given, "--speculative-num-steps") or draft_steps
        flags += ["--speculative-algorithm", "EAGLE3", "--speculative-draft-model-path", str(drafter)]
        flags += ["--speculative-eagle-topk", "1"]
        if "--speculative-num-steps" not in given:
            flags += ["--speculative-num-steps", str(steps)]
        if (_number(given, "--speculative-num-draft-tokens") or steps + 1) != steps + 1:
            raise UserError(f"--speculative-num-draft-tokens: a chain of {steps} steps has {steps + 1} tokens")
        if "--speculative-num-draft-tokens" not in given:
            flags += ["--speculative-num-draft-tokens", str(steps + 1)]
        if "--quantization" in given and "--speculative-draft-model-quantization" not in given:
            flags += ["--speculative-draft-model-quantization", "unquant"]  # it would follow the target's
    host, port = given.get("--host") or "127.0.0.1", _number(given, "--port") or 30000
    for flag, value in (("--host", host), ("--port", port)):
        flags += [] if flag in given else [flag, str(value)]
    reached = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, host)
    command = [str(python), "-m", "sglang.launch_server", *flags, *arguments]
    return Launch(command, environment, f"http://{reached}:{port}", given.get("--api-key"))


def installed_version(python: Path) -> str:
    """The version of the SGLang that `python` has, if it is a supported one. Raises `UserError`."""
    code = "import importlib.metadata as metadata; print(metadata.version('sglang'))"
    try:
        done = subprocess.run([str(python), "-c", code], capture_output=True, text=True, timeout=120)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UserError(f"{python}: cannot be run ({error}); name the Python of an environment with SGLang") from error
    if done.returncode != 0:
        raise UserError(f"{python}: has no SGLang; install sglang=={VERSIONS[0]} in an environment and name its Python")
    version = done.stdout.strip()
    if version not in VERSIONS:
        raise UserError(f"{python}: has SGLang {version}; supported are {' and '.join(VERSIONS)}")
    return version


def _know_drafters() -> dict[str, str]:
    """Variables under which SGLang knows our drafters' classes."""
    if not (PATCHES / PACKAGE).is_dir():
        raise UserError(f"{PATCHES / PACKAGE}: no such directory; run from a clone of the repository")
    other = os.environ.get(PACKAGE_VARIABLE, PACKAGE)
    if other != PACKAGE:
        raise UserError(f"{PACKAGE_VARIABLE} is {other}, and SGLang takes one such package: unset it")
    paths = [str(PATCHES), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    return {"PYTHONPATH": os.pathsep.join(dict.fromkeys(paths)), PACKAGE_VARIABLE: PACKAGE}


def _check_drafter(path: Path, target: dict[str, Any], given: dict[str, str]) -> None:
    """That a drafter, whoever made it, is for this target (its `config.json`) and for contexts as long."""
    drafter = read_json(require_directory(path, "a drafter's checkpoint") / "config.json")
    architecture = (drafter.get("architectures") or [""])[0]
    if not str(architecture).endswith("Eagle3"):
        raise UserError(f"{path}: architecture {architecture!r} is no EAGLE-3 drafter's")
    for key, theirs in (("target_hidden_size", "hidden_size"), ("vocab_size", "vocab_size")):
        if None not in (drafter.get(key), target.get(theirs)) and drafter[key] != target[theirs]:
            raise UserError(
                f"{path}: {key} is {drafter[key]}, the target's {theirs} {target[theirs]}: of another target"
            )
    taps = (drafter.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    layers = target.get("num_hidden_layers")
    if taps and layers and not all(0 <= tap < layers for tap in taps):
        raise UserError(f"{path}: tap layers {taps} are not all among the target's {layers}")
    key = "max_position_embeddings"
    positions, context = drafter.get(key), _number(given, "--context-length") or target.get(key)
    if positions and context and positions < context:
        raise UserError(
            f"{path}: {key} is {positions}, and the target is served with {context}: give --context-length {positions}"
        )


def _flags(arguments: Sequence[str]) -> dict[str, str]:
    """Flags and their (first) values, "" where there is none; `--flag value` and `--flag=value`."""
    found = {}
    for item, following in itertools.zip_longest(arguments, arguments[1:], fillvalue=""):
        if item.startswith("--"):
            flag, separator, value = item.partition("=")
            found[flag] = value if separator or following.startswith("--") else following
    return found


def _number(given: dict[str, str], flag: str) -> int | None:
    if flag not in given:
        return None
    if not given[flag].isdecimal() or int(given[flag]) < 1:
        raise UserError(f"{flag}: {given[flag]!r} is no whole number above 0")
    return int(given[flag])
