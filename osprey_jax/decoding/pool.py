"""A pool of servers that serve one model, and the conversations that they are asked.

Each server has at most `concurrency` requests at a time. One that cannot be reached, fails several times in a row,
or refuses several conversations in a row, is taken out and asked for its model again and again; once it tells, it is
tried with something short, and when that is answered it is in again. Meanwhile its conversations go to the others.
A conversation is refused when all servers that are in refuse it.
"""

import asyncio
import dataclasses
import hashlib
import sys
import time
from typing import Any, Literal

from tqdm import tqdm

from osprey_jax.command import UserError
from osprey_jax.config import RegenerateConfig
from osprey_jax.decoding import endpoint
from osprey_jax.decoding.chat import Chat
from osprey_jax.decoding.dialogues import Dialogue, Question, Unanswerable
from osprey_jax.decoding.endpoint import Answer, Card, Endpoint, Fault, Refused, jittered
from osprey_jax.decoding.sink import Sink

_FAULTS_IN_A_ROW = 3  # after which a server is out
_REFUSALS_IN_A_ROW = 5  # likewise, where anything was answered so far
_MISSED = 3  # times that a silent server does not tell its model, after which it is out
_TRIES = 8  # of a turn
_SHORT = 8  # tokens of an answer that shows that a server can; fewer may be no text, where a parser takes `<think>`
_REFUSALS = 50  # and no answer: it is the requests, not the conversations


@dataclasses.dataclass
class _Load:
    """Requests that a server has. One that was out starts anew, whatever became of what it had."""

    busy: int = 0
    limits: set[asyncio.Timeout] = dataclasses.field(default_factory=set)  # that end what it has


class _Server:
    """A server's part in the pool: `in`, `out`, or on `trial`."""

    def __init__(self, url: str, timeout: float):
        self.endpoint = Endpoint(url, timeout)
        self.state: Literal["in", "out", "trial"] = "out"
        self.is_out = asyncio.Event()
        self.is_out.set()
        self.load = _Load()
        self.faults = self.refusals = 0  # since its last answer
        self.allowed = 1  # refusals in a row; more once it answered, and when it was taken out for them in error
        self.signs = 0  # answers and refusals, by which it shows that it does something
        self.heard = time.monotonic()  # when it gave the last
        self.delay = endpoint.FIRST_DELAY_S
        self.reason = ""  # for being out
        self.other_prompts = False  # said that it renders prompts in another way

    def __str__(self) -> str:
        return self.endpoint.url

    @property
    def there(self) -> bool:
        """In, as far as is known: also before it was ever asked for its model."""
        return self.state == "in" or not self.reason


class _Waiting:
    """A conversation without a place."""

    def __init__(self, last: _Server | None, avoided: set[_Server]):
        self.last = last
        self.avoided = avoided
        self.place: asyncio.Future[tuple[_Server, _Load]] = asyncio.get_running_loop().create_future()


class _Failed(Exception):
    """All tries of a turn failed; the last reason."""


class Pool:
    def __init__(self, config: RegenerateConfig, chat: Chat, card: Card):
        self._config = config
        self._chat = chat
        self._card = card
        self._servers = [_Server(url, config.timeout) for url in config.servers]
        self._waiting: list[_Waiting] = []  # in the order in which they get places
        self._none_since: float | None = time.monotonic()  # that no server is in
        self._answers = self._refusals = 0
        self._short = self._body(Question([{"role": "user", "content": "Hi"}], [], _SHORT, 0, 0))  # what tries a server

    async def answer(self, dialogues: list[Dialogue], sink: Sink) -> None:
        number = min(len(dialogues), len(self._servers) * self._config.concurrency)
        dialogues.reverse()
        try:
            async with asyncio.TaskGroup() as group:
                tending = [group.create_task(self._tend(server)) for server in self._servers]
                tending += [group.create_task(self._listen(server)) for server in self._servers]
                tending.append(group.create_task(self._watch()))
                async with asyncio.TaskGroup() as workers:
                    for _ in range(number):
                        workers.create_task(self._work(dialogues, sink))
                for task in tending:
                    task.cancel()
        finally:
            for server in self._servers:
                await server.endpoint.close()

    # ---- conversations

    async def _work(self, waiting: list[Dialogue], sink: Sink) -> None:
        while waiting:
            await self._converse(waiting.pop(), sink)

    async def _converse(self, dialogue: Dialogue, sink: Sink) -> None:
        server = None
        try:
            while not dialogue.complete:
                question = dialogue.question(self._chat, self._config.max_new_tokens)
                answer, server = await self._ask(question, server)
                dialogue.answer(question, self._message(question, answer), answer.finish_reason)
                sink.tokens(answer.tokens or 0)
            sink.finished(dialogue)
        except Unanswerable as reason:
            sink.finished(dialogue, str(reason))
        except Refused as reason:
            sink.finished(dialogue, str(reason))
            self._refusals += 1
            if self._refusals >= _REFUSALS and not self._answers:
                raise UserError(f"the first {self._refusals} requests were all {reason}") from reason
        except _Failed as reason:
            sink.failed(dialogue, str(reason))

    def _message(self, question: Question, answer: Answer) -> dict[str, str]:
        if answer.reasoning:
            return self._chat.tidied(question.messages, answer.reasoning, answer.content)
        return self._chat.message(question.messages, answer.content)

    async def _ask(self, question: Question, last: _Server | None) -> tuple[Answer, _Server]:
        """The answer and the server that gave it, `last` if it can: it has the conversation in its cache."""
        body, tries = self._body(question), 0
        refusing: set[_Server] = set()
        avoided: set[_Server] = set()
        signs: dict[_Server, int] = {}  # of a server when this turn last failed there
        while True:
            server, load = await self._place(last, avoided)
            try:
                answer = await self._request(server, load, body)
                self._answers += 1
                self._short = body | {"max_tokens": min(body["max_tokens"], _SHORT)}
                self._worked(server)
                self._compare(question, answer, server)
                return answer, server
            except Refused as refused:
                self._refused(server, load, refused)
                refusing.add(server)
                avoided = refusing
                there = {server for server in self._servers if server.there}
                if there and there <= refusing:
                    raise
            except Fault as fault:
                self._fault(server, load, fault)
                avoided = refusing | {server}
                # Where others are answered in between, even what looks like the server's own fault is the turn's.
                if not fault.certain or server.signs > signs.get(server, 0):
                    signs[server] = server.signs
                    tries += 1
                    if tries == _TRIES:
                        raise _Failed(f"{_TRIES} tries failed, the last with {fault} ({server})") from fault
            finally:
                load.busy -= 1
                self._assign()
            if tries:
                await asyncio.sleep(jittered(min(endpoint.FIRST_DELAY_S * 2 ** (tries - 1), endpoint.LONGEST_DELAY_S)))

    async def _request(self, server: _Server, load: _Load, body: dict[str, Any]) -> Answer:
        try:
            async with asyncio.timeout(None) as limit:
                load.limits.add(limit)
                try:
                    return await server.endpoint.ask(body)
                finally:
                    load.limits.discard(limit)
        except TimeoutError as error:
            raise Fault("gone without a word", certain=True) from error

    def _body(self, question: Question) -> dict[str, Any]:
        config = self._config
        name = f"{config.seed} {question.number} {question.turn}"
        body = {
            "model": self._card.model,
            "messages": question.messages,
            "max_tokens": question.limit,
            "temperature": config.temperature,
            "top_p": config.top_p,
            "seed": int.from_bytes(hashlib.sha256(name.encode()).digest()[:4]) >> 1,
            # What servers else take from the model's generation_config.json, even where sampling is greedy.
            "top_k": -1,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
        }
        return body | ({"chat_template_kwargs": config.template_options} if config.template_options else {})

    def _compare(self, question: Question, answer: Answer, server: _Server) -> None:
        ours, theirs = len(question.prompt), answer.prompt_tokens
        if theirs not in (None, ours) and not server.other_prompts:
            server.other_prompts = True
            say(
                f"warning: {server} reads {theirs} tokens where {self._config.target} makes {ours} of a prompt: "
                "another tokenizer or chat template, or other template_options"
            )

    # ---- servers

    async def _place(self, last: _Server | None, avoided: set[_Server]) -> tuple[_Server, _Load]:
        """A server with a free place, which is then taken: `last` if it can be, `avoided` only if no other is in."""
        waiting = _Waiting(last, avoided)
        self._waiting.append(waiting)
        self._assign()
        return await waiting.place

    def _assign(self) -> None:
        """Give free places to those who wait, first come, first served."""
        self._waiting = [waiting for waiting in self._waiting if not waiting.place.cancelled()]
        for waiting in list(self._waiting):
            there = [server for server in self._servers if server.there]
            there = [server for server in there if server not in waiting.avoided] or there
            free = [server for server in there if server.state == "in" and server.load.busy < self._config.concurrency]
            if free:
                best = min(free, key=lambda server, last=waiting.last: (server is not last, server.load.busy))
                best.load.busy += 1
                self._waiting.remove(waiting)
                waiting.place.set_result((best, best.load))

    def _move(self, server: _Server, state: Literal["in", "out", "trial"]) -> None:
        server.state = state
        if any(server.state == "in" for server in self._servers):
            self._none_since = None
        elif self._none_since is None:
            self._none_since = time.monotonic()
        self._assign()

    def _worked(self, server: _Server) -> None:
        server.faults = server.refusals = 0
        server.allowed = max(server.allowed, _REFUSALS_IN_A_ROW)
        server.signs += 1
        server.heard = time.monotonic()
        if server.state != "in":
            self._enter(server)

    def _refused(self, server: _Server, load: _Load, refused: Refused) -> None:
        if load is not server.load:  # from before it was out
            return
        server.faults = 0
        server.refusals += 1
        server.signs += 1
        server.heard = time.monotonic()
        if self._answers and server.refusals >= server.allowed:
            server.allowed *= 2  # which counts if it is in again
            self._leave(server, str(refused))

    def _enter(self, server: _Server) -> None:
        if server.reason:
            say(f"{server}: in again")
        server.reason, server.delay, server.faults, server.refusals = "", endpoint.FIRST_DELAY_S, 0, 0
        server.is_out.clear()
        self._move(server, "in")

    def _fault(self, server: _Server, load: _Load, fault: Fault) -> None:
        if load is not server.load:  # from before it was out
            return
        server.faults += 1
        if fault.certain or server.faults >= _FAULTS_IN_A_ROW:
            self._leave(server, str(fault))

    def _leave(self, server: _Server, reason: str) -> None:
        if reason != server.reason:
            say(f"{server}: out ({reason})")
        server.reason, server.load = reason, _Load()
        server.is_out.set()
        self._move(server, "out")

    async def _tend(self, server: _Server) -> None:
        """Find out when `server` may be in."""
        while True:
            await server.is_out.wait()
            if server.reason:
                await asyncio.sleep(jittered(server.delay))
                server.delay = min(2 * server.delay, endpoint.LONGEST_DELAY_S)
            wrong = await self._wrong(server)
            if server.reason and not wrong:
                self._move(server, "trial")
                wrong = await self._tried(server)
            if wrong:
                self._leave(server, wrong)
            else:
                self._enter(server)

    async def _wrong(self, server: _Server) -> str | None:
        """Why `server` cannot be asked, as far as it tells."""
        card = await server.endpoint.card_or_fault()
        if isinstance(card, Fault):
            return str(card)
        if card.model != self._card.model:
            return f"has the model {card.model}, the others {self._card.model}"
        if card.context is not None and card.context < self._chat.context:
            return f"has a context of {card.context} tokens, the others {self._chat.context}"
        return None

    async def _tried(self, server: _Server) -> str | None:
        """Why `server` cannot be asked, as a request shows that no conversation is to blame for."""
        try:
            await server.endpoint.ask(self._short)
        except Refused as refused:
            if self._answers:  # this very request, by one of the servers
                return str(refused)
        except Fault as fault:
            return str(fault)
        server.allowed = max(server.allowed, _REFUSALS_IN_A_ROW)
        server.signs += 1
        return None

    async def _listen(self, server: _Server) -> None:
        """Take `server` out when its host is gone without a word, of which no connection tells."""
        missed = 0
        while True:
            await asyncio.sleep(endpoint.SILENCE_S)
            load = server.load
            silent = load.busy and time.monotonic() - server.heard > endpoint.SILENCE_S
            card = await server.endpoint.card_or_fault() if silent else None
            missed = missed + 1 if isinstance(card, Fault) else 0
            if missed >= _MISSED and load is server.load:
                self._leave(server, str(card))
                for limit in list(load.limits):
                    limit.reschedule(0)

    async def _watch(self) -> None:
        """Give up when no server has been in for too long, none that is being tried aside."""
        while True:
            await asyncio.sleep(endpoint.PATIENCE_S / 100)
            on_trial = any(server.state == "trial" for server in self._servers)
            none_for = 0.0 if self._none_since is None else time.monotonic() - self._none_since
            if none_for > endpoint.PATIENCE_S and not on_trial:
                reasons = "; ".join(f"{server}: {server.reason}" for server in self._servers)
                raise UserError(
                    f"no server has answered for {none_for:.0f} s ({reasons}); what is answered is kept, run the same "
                    "command again to go on"
                )


def say(text: str) -> None:
    """A line beside the progress bar."""
    tqdm.write(text, file=sys.stderr)
