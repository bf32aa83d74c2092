"""So many requests at a time on one server, and what is done when it does not answer them."""

import asyncio
import hashlib
import json
import sys
import time
from collections.abc import Callable
from typing import Any

from tqdm import tqdm

from osprey_jax.command import UserError
from osprey_jax.decoding.endpoint import FIRST_DELAY_S, LONGEST_DELAY_S, Fault, Refused, jittered
from osprey_jax.decoding.journal import Journal
from osprey_jax.evaluation.prompts import Item
from osprey_jax.serving.client import Served, SGLangServer

PATIENCE_S = 120.0  # with a server that cannot be reached
_TRIES = 3  # of a request
_FAILURES = 5  # requests in a row, each after all its tries; or refused before any is answered: it is the server
_WARM_TOKENS = 16
_LINE_S = 60.0  # between lines where no terminal shows the bar
KEPT = "what is finished is kept, the same command goes on"


def key_of(item: Item) -> str:
    """Names an item in a journal."""
    asked = [*item.name.values(), item.request.prompt, item.request.limit]
    return hashlib.sha256(json.dumps(asked).encode()).hexdigest()[:32]


class Load:
    """Keeps a server at a level of concurrency: each of its places takes the next request when its last is done.

    Args:
      ended: why the server's process is gone, or None.
      same: what a server says of itself -> what is kept of it, if it is still the one to be measured.
    """

    def __init__(
        self,
        name: str,
        server: SGLangServer,
        ended: Callable[[], str | None],
        same: Callable[[dict[str, Any]], dict[str, Any]],
    ):
        self._name, self._server, self._ended, self._same = name, server, ended, same
        self._returning = asyncio.Lock()  # one asks whether the server is back, all wait
        self._failures = 0
        self._refused: list[tuple[Journal, dict[str, Any]]] | None = []  # before the first answer; then None
        self._manner: dict[str, bool] = {"speculates": False, "incremental": False}

    async def ask(self, items: list[Item], level: int, journal: Journal, title: str, *, done: int) -> None:
        """An entry in `journal` for each of `items`, `level` of them at a time.

        Raises:
          UserError: the server is gone, or fails whatever it is asked. What was answered before is kept.
        """
        await self._warm(items[:level])
        waiting, told, total = list(reversed(items)), time.monotonic(), done + len(items)

        async def work() -> None:
            nonlocal done, told
            while waiting:
                item = waiting.pop()
                before = (journal.read(key_of(item)) or {}).get("intervals", [])  # of a run in which it failed
                entry = {"key": key_of(item)} | item.name | await self._complete(item, before)
                journal.add(entry)
                self._judge(journal, entry)
                bar.update()
                done += 1
                if bar.disable and (done == total or time.monotonic() - told > _LINE_S):
                    told = time.monotonic()
                    print(f"{title}: {done}/{total} prompts", file=sys.stderr, flush=True)

        with tqdm(total=total, initial=done, desc=title, unit=" prompts", disable=None) as bar:
            async with asyncio.TaskGroup() as group:
                for _ in range(min(level, len(items))):
                    group.create_task(work())

    def _judge(self, journal: Journal, entry: dict[str, Any]) -> None:
        """A refusal is for good once the server has shown that it answers others."""
        if self._refused is None:
            return
        if "failed" not in entry:
            for of_journal, refused in self._refused:
                of_journal.add(refused | {"for_good": True})
            self._refused = None
        elif entry["for_good"]:
            journal.add(entry | {"for_good": False})
            self._refused.append((journal, entry))
            if len(self._refused) == _FAILURES:
                raise UserError(f"{self._name}: the first {_FAILURES} requests were all {entry['failed']}; {KEPT}")

    async def until_back(self) -> dict[str, Any]:
        """What the server says of itself, once it does. Raises `UserError`: another server, or none for too long."""
        async with self._returning:
            begin, delay, told = time.monotonic(), FIRST_DELAY_S, False
            while True:
                if reason := self._ended():
                    raise UserError(f"{self._name}: the server {reason}; {KEPT}")
                try:
                    info = await self._server.info()
                    kept = self._same(info)
                    incremental = bool(info.get("incremental_streaming_output"))
                    self._manner = {"speculates": bool(info.get("speculative_algorithm")), "incremental": incremental}
                    return kept
                except Fault as fault:
                    if time.monotonic() - begin > PATIENCE_S:
                        lost = f"{self._server.url}: {fault}, for {PATIENCE_S:g} s"
                        raise UserError(f"{self._name}: {lost}; {KEPT}") from fault
                    if not told:
                        self._say(f"waiting for the server ({fault})")
                        told = True
                await asyncio.sleep(jittered(delay))
                delay = min(2 * delay, LONGEST_DELAY_S / 6)

    async def _warm(self, items: list[Item]) -> None:
        """So that the first request is as fast as the others, and its prompt not in the server's cache."""
        short = [self._serve(item, min(item.request.limit, _WARM_TOKENS)) for item in items]
        await asyncio.gather(*short, return_exceptions=True)  # what fails here, fails again below
        try:
            await self._server.flush()
        except Fault as fault:
            self._say(f"warning: {fault}")

    async def _complete(self, item: Item, intervals: list[tuple[float, float]]) -> dict[str, Any]:
        """The answer, or why there is none; and when it was tried, now and before."""
        tries = 0
        while True:
            begin = time.time()
            try:
                served = await self._serve(item, item.request.limit)
            except Refused as refused:
                return {"intervals": [*intervals, (begin, time.time())], "failed": str(refused), "for_good": True}
            except Fault as fault:
                intervals, tries = [*intervals, (begin, time.time())], tries + 1
                self._say(f"{item.questions.id}: {fault}")
                await self.until_back()
                if tries == _TRIES:
                    self._failures += 1
                    if self._failures == _FAILURES:
                        lost = f"the last {_FAILURES} requests all failed, {_TRIES} times each ({fault})"
                        raise UserError(f"{self._name}: {lost}; {KEPT}") from fault
                    return {"intervals": intervals, "failed": str(fault), "for_good": False}
                await asyncio.sleep(jittered(FIRST_DELAY_S))
            else:
                self._failures = 0
                return {"intervals": [*intervals, (begin, begin + served.seconds)], **vars(served)}

    async def _serve(self, item: Item, limit: int) -> Served:
        return await self._server.complete(item.request.prompt, limit, **self._manner)

    def _say(self, text: str) -> None:
        tqdm.write(f"{self._name}: {text}", file=sys.stderr)
