"""What this machine is, for a report."""

import os
import platform
import re
import subprocess
from pathlib import Path
from typing import Any


def machine() -> dict[str, Any]:
    """`gpu`: the kinds of GPU here, as the driver names them, None without; `cpu`; `cpus`."""
    return {"gpu": _gpus(), "cpu": _cpu(), "cpus": os.cpu_count()}


def _gpus() -> str | None:
    command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return None
    names = sorted(set(filter(None, map(str.strip, done.stdout.splitlines()))))
    return ", ".join(names) if done.returncode == 0 and names else None


def _cpu() -> str:
    try:
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        found = None
    return found[1] if found else platform.processor() or platform.machine()
