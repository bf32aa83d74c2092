"""Where answered dialogues go: the journal, and the progress bar."""

import collections
import sys
import time

from tqdm import tqdm

from osprey_jax.decoding.dialogues import Dialogue
from osprey_jax.decoding.journal import Journal

_WINDOW_SECONDS = 60.0  # over which tokens/s are counted
_LINE_SECONDS = 60.0  # between lines where no terminal shows the bar


class Sink:
    """Keeps what is finished, shows how fast. A context manager."""

    def __init__(self, journal: Journal, done: int, total: int):
        self._journal = journal
        self._bar = tqdm(total=total, initial=done, desc="answer", unit=" conversations", disable=None)
        self._started = self._told = time.monotonic()
        self._before, self._done, self._total = done, done, total
        self._recent = collections.deque([(self._started, 0)])  # times and counts; the first only says when it starts
        self._recent_tokens = 0

    def __enter__(self) -> "Sink":
        return self

    def __exit__(self, *_) -> None:
        self._bar.close()
        self._journal.close()

    def tokens(self, count: int) -> None:
        """So many were written just now."""
        now = time.monotonic()
        self._recent.append((now, count))
        self._recent_tokens += count
        while now - self._recent[0][0] > _WINDOW_SECONDS and len(self._recent) > 2:
            self._recent.popleft()
            self._recent_tokens -= self._recent[0][1]
        rate = f"{self._recent_tokens / max(now - self._recent[0][0], 1e-3):.0f} tokens/s"
        self._bar.set_postfix_str(rate, refresh=False)
        if self._bar.disable and now - self._told > _LINE_SECONDS:
            self._told = now
            line = f"answer: {self._done}/{self._total} conversations, {rate}"
            if done := self._done - self._before:
                left = (now - self._started) / done * (self._total - self._done)
                line += f", {tqdm.format_interval(left)} left"
            print(line, file=sys.stderr, flush=True)

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
        """For a reason that may pass: it is asked once more. Fails that too, the answers before are kept."""
        entry = {"key": dialogue.key, "id": dialogue.id, "failed": reason, "for_good": False}
        self._add(entry | ({"record": dialogue.written()} if dialogue.answered else {}))

    def _add(self, entry: dict) -> None:
        self._journal.add(entry)
        self._done += 1
        self._bar.update()
