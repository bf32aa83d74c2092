"""Preparation in small blocks, as a process that tests can kill.

python -m tests.data.preparing PATTERN CACHE PROCESSES BLOCK_BYTES
"""

import resource
import sys
from pathlib import Path

from osprey_jax.command import run
from osprey_jax.data import preparation
from osprey_jax.data.recipes import ConversationRecipe
from tests.conftest import GOLDEN


def recipe(length: int = 400) -> ConversationRecipe:
    return ConversationRecipe(GOLDEN / "qwen3/target", length, template_options={}, only_last_turn=False, packing=True)


def main() -> None:
    pattern, cache, processes, block_bytes = sys.argv[1:]
    preparation.BLOCK_BYTES, preparation.BLOCKS_A_SHARD = int(block_bytes), 4
    rows = preparation.prepare([pattern], recipe(), Path(cache), int(processes))
    print(rows.directory)
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)


if __name__ == "__main__":
    run(main)
