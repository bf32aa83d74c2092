"""A "Python with SGLang" for tests: an executable whose server is a fake one.

Run as a program it is that Python: `-c ...` prints the version, `-m sglang.launch_server ... --port N` serves.
"""

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def fake_python(folder: Path, behaviour: str = "serves", version: str = "0.5.23") -> Path:
    """An executable in `folder`. `behaviour`: serves, dies, starts_late, hangs_at_start, no_speculation, stubborn,
    nonsense, dies_later, dies_when_asked."""
    path = folder / f"python-{behaviour}-{version}"
    arguments = f"{str(folder)!r}, {behaviour!r}, {version!r}"
    code = f"sys.path.insert(0, {str(ROOT)!r})\nfrom tests.serving.fake_environment import main\nmain({arguments})"
    path.write_text(f"#!{sys.executable}\nimport sys\n{code}\n")
    path.chmod(0o755)
    return path


def main(folder: str, behaviour: str, version: str) -> None:
    if sys.argv[1] == "-c":
        if version == "none":
            sys.exit("PackageNotFoundError: sglang")
        return print(version)
    kept = ("PYTHONPATH", "SGLANG_EXTERNAL_MODEL_PACKAGE")
    seen = {"arguments": sys.argv[1:], "environment": {name: os.environ.get(name) for name in kept}}
    # A child, as SGLang's scheduler is one: it must go with the server.
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    Path(folder, "seen.json").write_text(json.dumps(seen | {"child": child.pid, "pid": os.getpid()}))
    print("loading")
    if behaviour == "dies":
        print(
            "Traceback ...\nValueError: draft model x: missing embed_tokens.weight; export the drafter again\nbye",
            flush=True,
        )
        sys.exit(3)
    if behaviour == "stubborn":
        import signal

        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if behaviour == "hangs_at_start":
        time.sleep(600)
    if behaviour == "starts_late":
        time.sleep(1)
    from tests.evaluation.fake_sglang import SPECULATING, FakeSGLang

    port = int(sys.argv[sys.argv.index("--port") + 1])
    speculates = "--speculative-algorithm" in sys.argv and behaviour != "no_speculation"
    server = FakeSGLang(port=port, **(SPECULATING if speculates else {}))
    if "--api-key" in sys.argv:
        server.key = sys.argv[sys.argv.index("--api-key") + 1]
    if behaviour == "nonsense":
        server.fault = lambda number, body: "garbage"
    if behaviour == "dies_when_asked":
        server.fault = lambda number, body: os._exit(3)
    if behaviour == "dies_later":
        server.fault = lambda number, body: os._exit(3) if number == 4 else None
    threading.Event().wait()
