"""What `apply.sh` does, with nothing but Python's standard library; its usage is described there.

Two things change in SGLang: a package is added that nothing imports, and `registry.py`, which then imports it. Each
change is one rename, in this order, and the reverse order back: wherever it stops, SGLang is as it was or patched.
The package carries `installed.json`, the sha256 of every file put there, and the original `registry.py`: by these, and
by the sha256 of each version's own file below, someone else's change is told from ours.
"""

import argparse
import contextlib
import fcntl
import hashlib
import importlib.util
import json
import os
import re
import shutil
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
PACKAGE = "osprey_sgl_models"
PRISTINE = {  # sha256 of srt/models/registry.py in the wheel
    "0.5.9": "ecd264ebeb3d3fc49de63b077ed6e024b4e48f62f5ba9baf16113dab0d82b717",
    "0.5.23": "2394ed48eddaf315cfe8e9220969e8ebf796aebd5adb2b7394baa951f6f6e020",
}
RECORD = "installed.json"
ORIGINAL = "registry.py.orig"

EXPLAINED = {
    "pristine": "",
    "applied": "",
    "outdated": "it was applied from another version of osprey-jax; --apply replaces it, --revert takes it back",
    "interrupted": "the models are there and not in use; --apply goes on, --revert takes them back",
}


class Refused(Exception):
    """One line: what, where, and what to do."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="apply.sh", description="Put the drafters' models into SGLang.")
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("--check", action="store_true", help="say which state SGLang is in")
    action.add_argument("--apply", action="store_true", help="add the models")
    action.add_argument("--revert", action="store_true", help="take them back, to the byte")
    parser.add_argument("--python", metavar="PYTHON", help="whose SGLang (default: python3)")  # read by apply.sh
    parser.add_argument("--site-packages", type=Path, metavar="DIR", help="the directory that holds sglang/ itself")
    arguments = parser.parse_args()
    try:
        sglang = find_sglang(arguments.site_packages)
        models, version = sglang / "srt" / "models", sglang_version(sglang)
        with locked(models):
            if arguments.check:
                found = state(models, version)
                print(f"{found}: SGLang {version} in {sglang}" + (EXPLAINED[found] and f": {EXPLAINED[found]}"))
                return 0 if found in ("pristine", "applied") else 1
            change = apply if arguments.apply else revert
            print(f"{change(models, version)}: SGLang {version} in {sglang}")
    except Refused as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"error: {error.filename}: {error.strerror}; --check says which state SGLang is in", file=sys.stderr)
        return 1
    return 0


def find_sglang(site_packages: Path | None) -> Path:
    """The package's directory; SGLang itself is not imported."""
    if site_packages is not None:
        found = site_packages.resolve() / "sglang"
        if not (found / "srt" / "models" / "registry.py").is_file():
            raise Refused(f"{site_packages}: no SGLang there (sglang/srt/models/registry.py); name the directory above")
        return found
    spec = importlib.util.find_spec("sglang")
    if spec is None or spec.origin is None:
        raise Refused(f"{sys.executable} has no SGLang; name another with --python, or its directory")
    return Path(spec.origin).resolve().parent


def sglang_version(sglang: Path) -> str:
    supported = " and ".join(PRISTINE)
    written = sglang / "_version.py"
    found = re.search(r"^__version__ = .*?'(.+)'", written.read_text() if written.is_file() else "", re.MULTILINE)
    version = found[1] if found else "of unknown version"
    if version not in PRISTINE:
        raise Refused(f"{sglang}: SGLang {version} is not supported; the patches are for {supported}")
    return version


@contextlib.contextmanager
def locked(models: Path):
    """One at a time; the kernel lets go of the lock of a process that died."""
    handle = os.open(models, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def state(models: Path, version: str) -> str:
    """One of `EXPLAINED`; `Refused` where a file is neither the release's nor ours."""
    registry, package = models / "registry.py", models / PACKAGE
    pristine = sha256(registry.read_bytes()) == PRISTINE[version]
    foreign = "is neither SGLang's own nor osprey-jax's; install SGLang again, or undo that change, first"
    if not os.path.lexists(package):
        if pristine:
            return "pristine"
        raise Refused(f"{registry} {foreign}")
    try:
        record = json.loads((package / RECORD).read_bytes())
        files = {file.name: sha256(file.read_bytes()) for file in package.iterdir() if file.name != "__pycache__"}
        ours = package.is_dir() and not package.is_symlink() and files.pop(RECORD) and files == record["package"]
    except (OSError, ValueError, KeyError, TypeError):
        ours = False
    if not ours or files.get(ORIGINAL) != PRISTINE[version]:
        raise Refused(f"{package} {foreign}")
    if pristine:
        return "interrupted"
    if sha256(registry.read_bytes()) != record.get("registry.py"):
        raise Refused(f"{registry} {foreign}")
    return "applied" if record == contents(models, version)[1] else "outdated"


def contents(models: Path, version: str) -> tuple[dict[str, bytes], dict]:
    """(name -> bytes of the package and of the patched `registry.py`, what `installed.json` records).

    `models` holds the original, as `registry.py` or in the package.
    """
    backup = models / PACKAGE / ORIGINAL
    original = (backup if backup.is_file() else models / "registry.py").read_bytes()
    patch = (HERE / version / "registry.patch").read_text()
    files = {file.name: file.read_bytes() for file in sorted((HERE / PACKAGE).glob("*.py"))} | {ORIGINAL: original}
    patched = patched_text(original.decode(), patch).encode()
    record = {
        "registry.py": sha256(patched),
        "package": {name: sha256(data) for name, data in files.items()},
    }
    return files | {"registry.py": patched}, record


def patched_text(text: str, patch: str) -> str:
    """A unified diff of one file, applied where it says: the file is known to the byte."""
    lines, out, at = text.splitlines(keepends=True), [], 0
    for line in patch.splitlines(keepends=True)[2:]:
        if line.startswith("@@"):
            start = int(re.match(r"@@ -(\d+)", line)[1]) - 1
            out += lines[at:start]
            at = start
        elif line.startswith("+"):
            out.append(line[1:])
        else:
            if lines[at] != line[1:]:
                raise ValueError(f"the patch does not fit at line {at + 1}")
            if line.startswith(" "):
                out.append(line[1:])
            at += 1
    return "".join(out + lines[at:])


def apply(models: Path, version: str) -> str:
    found = state(models, version)
    _clean_up(models)
    if found == "applied":
        return "already applied"
    files, record = contents(models, version)
    files[RECORD] = json.dumps(record, indent=1).encode()
    registry, package = models / "registry.py", models / PACKAGE
    patched = files.pop("registry.py")
    try:  # whatever can fail for want of room or rights comes before the first rename
        new = _beside(package, "new")
        new.mkdir()
        shutil.copymode(models, new)
        for name, data in files.items():
            _write(new / name, data, like=registry)
        shutil.copystat(registry if found == "pristine" else package / ORIGINAL, new / ORIGINAL)
        _sync(new)
        _write(_beside(registry, "new"), patched, like=registry)
        if found != "pristine":  # the package is of an earlier call
            _take_back(models)
        _copy_original(new / ORIGINAL, registry)
        os.rename(new, package)
        try:
            _sync(models)
            _replace(registry, "new")
        except BaseException:
            _take_out(models)
            raise
    finally:
        _clean_up(models)
    return "applied"


def revert(models: Path, version: str) -> str:
    found = state(models, version)
    _clean_up(models)
    if found == "pristine":
        return "already pristine"
    try:
        _take_back(models)
    finally:
        _clean_up(models)
    return "reverted"


def _take_back(models: Path) -> None:
    _copy_original(models / PACKAGE / ORIGINAL, models / "registry.py")
    _take_out(models)


def _copy_original(original: Path, registry: Path) -> None:
    """Beside `registry`, with the times and rights that it had."""
    old = _beside(registry, "old")
    _write(old, original.read_bytes(), like=original)
    shutil.copystat(original, old)


def _take_out(models: Path) -> None:
    """The original in its place, then the package out of it."""
    out = _beside(models / PACKAGE, "old")
    shutil.rmtree(out, ignore_errors=True)
    _replace(models / "registry.py", "old")
    os.rename(models / PACKAGE, out)
    _sync(models)


def _replace(registry: Path, suffix: str) -> None:
    """The file beside `registry` in its place; what was compiled from the one before goes."""
    os.replace(_beside(registry, suffix), registry)
    _sync(registry.parent)
    for compiled in (registry.parent / "__pycache__").glob("registry.*.pyc"):
        compiled.unlink()


def _beside(path: Path, suffix: str) -> Path:
    return path.with_name(f".{path.name}.osprey-{suffix}")  # a name that Python does not import


def _clean_up(models: Path) -> None:
    """What a call left behind, this one or one that was killed: nothing reads it."""
    for suffix in ("new", "old"):
        shutil.rmtree(_beside(models / PACKAGE, suffix), ignore_errors=True)
        _beside(models / "registry.py", suffix).unlink(missing_ok=True)


def _write(path: Path, data: bytes, like: Path) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    shutil.copymode(like, path)


def _sync(directory: Path) -> None:
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


if __name__ == "__main__":
    sys.exit(main())
