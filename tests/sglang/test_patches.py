"""`sglang_patches/apply.sh` on copies of what the wheels of SGLang hold."""

import base64
import csv
import hashlib
import os
import py_compile
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.sglang import server
from tests.sglang.drafts import RELEASES, external, served, write_draft
from tests.sglang.server import HERE, PACKAGES, STAMP
from tests.sglang.test_drafts import DRAFTERS
from tests.sglang.test_tensor_parallel import check_server

pytestmark = [
    pytest.mark.sglang,
    pytest.mark.skipif(not (STAMP.is_file() and STAMP.read_text()), reason=f"no SGLang: run {HERE / 'install.sh'}"),
]

MODELS = Path("sglang/srt/models")
REGISTRY = MODELS / "registry.py"
ADDED = MODELS / "osprey_sgl_models"


def apply(action: str, site_packages: Path, patches: Path = PACKAGES) -> tuple[int, str]:
    """(exit status, the line it prints)."""
    done = subprocess.run(
        [str(patches / "apply.sh"), action, "--site-packages", str(site_packages)],
        capture_output=True,
        text=True,
        timeout=60,
    )
    lines = (done.stdout + done.stderr).splitlines()
    assert len(lines) == 1 and bool(done.stdout) == (not done.stderr)
    return done.returncode, lines[0]


def digests(site_packages: Path) -> dict[str, str]:
    """{relative path: sha256} of every file but what Python compiled."""
    return {
        str(file.relative_to(site_packages)): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in (site_packages / "sglang").rglob("*")
        if file.is_file() and file.suffix != ".pyc"
    }


def recorded(release: Path, version: str) -> dict[str, str]:
    """The same by the wheel's own RECORD."""
    with (release / f"sglang-{version}.dist-info" / "RECORD").open(newline="") as file:
        rows = [row for row in csv.reader(file) if row[0].startswith("sglang/") and not row[0].endswith(".pyc")]
    code = lambda value: base64.urlsafe_b64decode(value.removeprefix("sha256=") + "==").hex()
    return {path: code(value) for path, value, _ in rows}


@pytest.fixture(params=RELEASES)
def version(request):
    return request.param


@pytest.fixture
def small(version, tmp_path):
    """A copy of the files that `apply.sh` looks at, and two more."""
    kept = ["__init__.py", "_version.py", "srt/models/__init__.py", "srt/models/registry.py", "srt/models/llama.py"]
    for name in kept:
        source, copy = RELEASES[version] / "sglang" / name, tmp_path / "site" / "sglang" / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        if source.exists():
            shutil.copy2(source, copy)
    return tmp_path / "site"


def test_every_file_is_the_wheels_again(version, tmp_path):
    """By the wheel's own list; between, one file differs and the package is there; each action may be repeated."""
    copy = tmp_path / "site"
    shutil.copytree(
        RELEASES[version] / "sglang", copy / "sglang", ignore=shutil.ignore_patterns("__pycache__"), symlinks=True
    )
    wheel = recorded(RELEASES[version], version)
    assert len(wheel) > 1000 and digests(copy) == wheel
    assert apply("--check", copy)[1].startswith(f"pristine: SGLang {version} in ")
    assert apply("--apply", copy)[0] == 0
    patched = digests(copy)
    assert apply("--apply", copy)[1].startswith("already applied: ")
    assert digests(copy) == patched
    assert apply("--check", copy) == (0, f"applied: SGLang {version} in {copy / 'sglang'}")
    changed = {path for path in wheel if patched[path] != wheel[path]}
    models = {file.name for file in (PACKAGES / "osprey_sgl_models").glob("*.py")}
    added = {str(ADDED / name) for name in models | {"installed.json", "registry.py.orig"}}
    assert changed == {str(REGISTRY)} and set(patched) - set(wheel) == added
    assert apply("--revert", copy)[1].startswith("reverted: ")
    assert apply("--revert", copy)[1].startswith("already pristine: ")
    assert digests(copy) == wheel and not (copy / ADDED).exists()


def test_patched_classes_compute_the_same(version, tmp_path):
    """The patch and the external package, to the bit; one layer of EAGLE-3 stays on SGLang's class."""
    copy = _linked_copy(RELEASES[version], tmp_path / "site")
    assert apply("--apply", copy)[0] == 0
    rest = [RELEASES["0.5.9"]] if version == "0.5.9" else []  # its transformers
    drafts = [write_draft(tmp_path / name, make()) for name, make in DRAFTERS.items()]
    wanted, _ = served(drafts, tmp_path / "external", *external(version)["paths"], package=external(version)["package"])
    found, _ = served(drafts, tmp_path / "patched", copy, *rest)
    for name, a, b in zip(DRAFTERS, wanted, found, strict=True):
        assert "error" not in b, b["error"]
        assert all(np.array_equal(a[key], b[key]) for key in ("logits", "streams"))
        where = "sglang.srt.models." + ("llama_eagle3" if name == "eagle3" else "osprey_sgl_models.eagle3")
        assert b["module"] == where


OTHER = """
from sglang.srt.models import llama_eagle3
class LlamaForCausalLMEagle3(llama_eagle3.LlamaForCausalLMEagle3): pass
EntryClass = LlamaForCausalLMEagle3
"""


def test_beside_an_external_package(version, tmp_path):
    """Who has one can have the patch: the package's classes come first, ours are found where it has none."""
    copy = _linked_copy(RELEASES[version], tmp_path / "site")
    assert apply("--apply", copy)[0] == 0
    package = tmp_path / "others" / "other_models"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "llama.py").write_text(OTHER)
    rest = [RELEASES["0.5.9"]] if version == "0.5.9" else []
    drafts = [write_draft(tmp_path / name, DRAFTERS[name]()) for name in ("qwen3", "eagle3")]
    found, _ = served(drafts, tmp_path / "out", copy, *rest, package.parent, package=package.name)
    modules = [str(result["module"]) for result in found]
    assert modules == ["sglang.srt.models.osprey_sgl_models.eagle3", "other_models.llama"]


def test_server_with_the_patch(monkeypatch, tmp_path):
    """The real one, without the variable; 0.5.9's does not speculate on a CPU."""
    copy = _linked_copy(RELEASES["0.5.23"], tmp_path / "site")
    assert apply("--apply", copy)[0] == 0
    variables = server.environment() | {"PYTHONPATH": os.pathsep.join([str(HERE / "shims"), str(copy)])}
    del variables["SGLANG_EXTERNAL_MODEL_PACKAGE"]
    monkeypatch.setattr(server, "environment", lambda: variables)
    check_server(tmp_path)


def _linked_copy(release: Path, out: Path) -> Path:
    """SGLang with its models copied, all else linked: two hundred megabytes less."""
    for level in (Path("sglang"), Path("sglang/srt")):
        (out / level).mkdir(parents=True)
        for entry in (release / level).iterdir():
            if entry.name not in ("srt", "models"):
                (out / level / entry.name).symlink_to(entry)
    shutil.copytree(release / MODELS, out / MODELS)
    return out


def test_other_versions_are_refused(small):
    """The line names those that are supported; nothing is touched."""
    written = small / "sglang" / "_version.py"
    written.write_text(written.read_text().replace("version = '0.5.", "version = '0.6."))
    before = digests(small)
    for action in ("--check", "--apply", "--revert"):
        status, line = apply(action, small)
        assert status == 1 and line.startswith("error: ") and "; the patches are for 0.5.9 and 0.5.23" in line
    assert digests(small) == before


@pytest.mark.parametrize("applied", [False, True])
@pytest.mark.parametrize("file", ["registry.py", "osprey_sgl_models/eagle3.py", "osprey_sgl_models/more.py"])
def test_changes_of_others_are_not_overwritten(small, applied, file):
    """Neither the release's bytes nor ours: refused by name, and left as it is."""
    if applied:
        apply("--apply", small)
    path = small / MODELS / file
    path.parent.mkdir(exist_ok=True)
    path.write_text((path.read_text() if path.exists() else "") + "# mine\n")
    before = digests(small)
    for action in ("--check", "--apply", "--revert"):
        status, line = apply(action, small)
        culprit = path if file == "registry.py" else small / ADDED
        assert status == 1 and f"error: {culprit} is neither SGLang's own nor osprey-jax's" in line
    assert digests(small) == before


def test_another_osprey_jax(small, tmp_path):
    """What an older checkout applied is not foreign: it can be replaced, and taken back."""
    older = tmp_path / "older"
    shutil.copytree(PACKAGES, older)
    for file in ("osprey_sgl_models/eagle3.py", "0.5.9/registry.patch", "0.5.23/registry.patch"):
        text = (older / file).read_text()
        (older / file).write_text(text.replace("rafters", "raftsmen"))
    before = digests(small)
    assert apply("--apply", small, older)[0] == 0
    status, line = apply("--check", small)
    assert status == 1 and line.startswith("outdated: ")
    assert apply("--apply", small)[1].startswith("applied: ")
    assert "raftsmen" not in (small / REGISTRY).read_text() + (small / ADDED / "eagle3.py").read_text()
    apply("--apply", small, older)
    assert apply("--revert", small)[0] == 0
    assert digests(small) == before


def test_nothing_stale_is_left_compiled(small):
    """Not even by a file that Python would use without looking at its source."""
    before = (small / REGISTRY).stat()
    for action in ("--apply", "--revert"):
        mode = py_compile.PycInvalidationMode.UNCHECKED_HASH
        compiled = Path(py_compile.compile(str(small / REGISTRY), invalidation_mode=mode))
        assert compiled.is_file()
        apply(action, small)
        assert not compiled.exists()
    after = (small / REGISTRY).stat()
    assert (after.st_mtime_ns, after.st_mode) == (before.st_mtime_ns, before.st_mode)


# Ends the process, or fails, at the nth call of a function that changes the tree.
INTERRUPTED = """
import os, shutil, sys
how, nth = sys.argv.pop(1), int(sys.argv.pop(1))
def wrap(name):
    real = getattr(os, name)
    def call(*arguments, **options):
        global nth
        nth -= 1
        if nth == 0:
            if how == "killed":
                os._exit(9)
            raise OSError(28, "No space left on device", str(arguments[0]))
        return real(*arguments, **options)
    setattr(os, name, call)
for name in ("mkdir", "rename", "replace", "fsync"):
    wrap(name)
sys.path.insert(0, sys.argv.pop(1))
import apply
sys.exit(apply.main())
"""


@pytest.mark.parametrize("version", ["0.5.9"])
@pytest.mark.parametrize("how", ["killed", "failed"])
@pytest.mark.parametrize("action", ["--apply", "--revert"])
def test_stopped_at_any_point(small, action, how):
    """SGLang is as it was or as it was to be, or holds models that nothing imports; and the next call goes on."""
    pristine = digests(small)
    apply("--apply", small)
    applied = digests(small)
    apply("--revert", small)
    before, after = (pristine, applied) if action == "--apply" else (applied, pristine)
    seen = set()
    for nth in range(1, 40):
        apply("--apply" if before is applied else "--revert", small)
        arguments = [str(PACKAGES), action, "--site-packages", str(small)]
        done = subprocess.run(
            [sys.executable, "-B", "-c", INTERRUPTED, how, str(nth), *arguments], capture_output=True, text=True
        )
        if done.returncode == 0:
            break
        assert done.returncode == (9 if how == "killed" else 1), done.stderr
        visible = {path: digest for path, digest in digests(small).items() if "/." not in path}
        alone = applied | {str(REGISTRY): pristine[str(REGISTRY)]}
        assert visible in ([before] if how == "failed" and action == "--apply" else [before, after, alone])
        seen.add(["before", "after", "alone"][[before, after, alone].index(visible)])
        if how == "failed":
            assert ": No space left on device; " in done.stderr and len(done.stderr.splitlines()) == 1
            assert digests(small) == visible, "something is left behind"
        if visible == alone:
            assert apply("--check", small)[1].startswith("interrupted: ")
        for next_action, wanted in (("--apply", applied), ("--revert", pristine)):
            assert apply(next_action, small)[0] == 0
            assert digests(small) == wanted
    assert nth > 5 and "before" in seen, "nothing was interrupted"
    assert how == "failed" or "alone" in seen


def test_finds_the_sglang_of_an_interpreter(small, tmp_path):
    """`--python`, as for a server's own environment; one without SGLang is refused, and so is a wrong call."""
    run = lambda *arguments, path="": subprocess.run(
        [str(PACKAGES / "apply.sh"), *arguments],
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=60,
    )
    done = run("--check", "--python", sys.executable, path=str(small))
    assert done.returncode == 0 and done.stdout.endswith(f" in {small / 'sglang'}\n")
    done = run("--check", "--python", sys.executable)
    assert done.returncode == 1 and done.stderr.endswith(
        "has no SGLang; name another with --python, or its directory\n"
    )
    done = run("--check", "--site-packages", str(tmp_path))
    assert done.returncode == 1 and "no SGLang there" in done.stderr
    for wrong in (["--python", "/nowhere", "--check"], ["--check", "--apply"], [], ["--python"]):
        assert run(*wrong).returncode == 2
