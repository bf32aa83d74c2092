"""Training runs on the golden models, and what they wrote."""

import json
from pathlib import Path


def metrics(run_dir: Path, split: str = "train") -> dict[int, dict]:
    """The lines of `metrics.jsonl` by step."""
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line for line in lines if line["split"] == split}
