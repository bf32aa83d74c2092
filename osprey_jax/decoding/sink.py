"""Where answered dialogues go: the journal, and the progress bar."""

import collections
import time

from tqdm import tqdm

from osprey_jax.decoding.dialogues import Dialogue
from osprey_jax.decoding.journal import Journal

_WINDOW_SECONDS = 60.0  # over which tokens/s are counted


class Sink:
    """Keeps what is finished, shows how fast. A context manager."""

    def __init__(self, journal: Journal, done: int, total: int):
        self._journal = journal
        self._bar = tqdm(total=total, initial=done, desc="answer", unit=" conversations", disable=None)
        self._recent = collections.deque([(time.monotonic(), 0)])

    def __enter__(self) -> "Sink":
        return self

    def __exit__(self, *_) -> None:
        self._bar.close()
        self._journal.close()

    def tokens(self, count: int) -> None:
        """So many were written just now."""
        now = time.monotonic()
        self._recent.append((now, count))
        while now - self._recent[0][0] > _WINDOW_SECONDS and len(self._recent) > 2:
            self._recent.popleft()
        # The first of the window only says when it starts.
        rate = sum(count for _, count in self._recent) - self._recent[0][1]
        self._bar.set_postfix_str(f"{rate / max(now - self._recent[0][0], 1e-3):.0f} tokens/s", refresh=False)

    def finished(self, dialogue: Dialogue, reason: str | None = None) -> None:
        """Nothing more is asked: all is answered, or `reason` keeps the next turn from being asked.

        The answers before that turn are kept; a dialogue without any has failed.
        """
        entry = {"key": dialogue.key, "id": dialogue.id}
        if dialogue.answered:
            entry |= {"record": dialogue.written()} | ({} if reason is None else {"left_out": reason})
        else:
            entry |= {"failed": reason, "for_good": True}
        self._add(entry)

    def failed(self, dialogue: Dialogue, reason: str) -> None:
        """For a reason that may pass."""
        self._add({"key": dialogue.key, "id": dialogue.id, "failed": reason, "for_good": False})

    def _add(self, entry: dict) -> None:
        self._journal.add(entry)
        self._bar.update()
