"""One OpenAI-compatible server: a chat completion asked, and everything that can come back."""

import asyncio
import contextlib
import dataclasses
import email.utils
import os
import random
import time
from collections.abc import AsyncIterator
from typing import Any

import httpx2

from osprey_jax.data.records import parse_line

FIRST_DELAY_S, LONGEST_DELAY_S = 0.5, 60.0  # between tries; each is twice the one before
PATIENCE_S = 600.0  # with a server, or all of them, that could do but does not
SILENCE_S = 30.0  # of a server that has requests, after which it is asked for its model
_CONNECT_S = 30.0
PROBE_S = 10.0
_IDLE_S = 2.0  # that a connection is kept: less than servers do, so that none closes it under a request (uvicorn: 5)

# Of the answers 4xx: what no conversation has caused, and what passes. All others are about the request.
_SERVER_IS_WRONG = (401, 403, 404, 405, 407)
_PASSES = (408, 425, 429)


class Fault(Exception):
    """No answer, by no fault of the conversation's as far as one can tell.

    Attributes:
      certain: the server cannot answer anything; else the conversation may have to do with it.
    """

    def __init__(self, what: str, *, certain: bool = False):
        super().__init__(what)
        self.certain = certain


class Refused(Exception):
    """The server says that it will never answer this."""


@dataclasses.dataclass(frozen=True)
class Answer:
    """What a server wrote. The counts are None where it does not tell."""

    content: str
    reasoning: str | None
    finish_reason: str
    tokens: int | None
    prompt_tokens: int | None


@dataclasses.dataclass(frozen=True)
class Card:
    """What a server serves; `context` in tokens, None where it does not tell."""

    model: str
    context: int | None


class Endpoint:
    """The server at `url`. Close it."""

    def __init__(self, url: str, timeout: float):
        """`timeout`: seconds that an answer may take. The environment's OPENAI_API_KEY, where set, is sent along."""
        self.url = url
        self.timeout = timeout
        limits = httpx2.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=_IDLE_S)
        key = os.environ.get("OPENAI_API_KEY")
        self.client = httpx2.AsyncClient(
            base_url=url,
            headers={"Authorization": f"Bearer {key}"} if key else None,
            timeout=httpx2.Timeout(None, connect=_CONNECT_S),
            limits=limits,
        )

    async def close(self) -> None:
        await self.client.aclose()

    async def card_or_fault(self) -> Card | Fault:
        try:
            return await self._card()
        except Fault as fault:
            return fault

    async def _card(self) -> Card:
        value = json_value(await self.send("GET", "/v1/models", None, PROBE_S))
        try:
            first = value["data"][0]
            model, context = first["id"], first.get("max_model_len")
        except (TypeError, KeyError, IndexError, AttributeError) as error:
            raise Fault("/v1/models names no model", certain=True) from error
        return Card(str(model), context if type(context) is int else None)

    async def ask(self, body: dict[str, Any]) -> Answer:
        """A chat completion; while the server is too busy (429), it is asked again when it says.

        Raises:
          Refused, Fault.
        """
        started, delay = time.monotonic(), FIRST_DELAY_S
        while True:
            response = await self.send("POST", "/v1/chat/completions", body, self.timeout)
            if response.status_code != 429:
                return _answer(response)
            pause = _retry_after(response) or jittered(delay)
            if time.monotonic() + pause - started > PATIENCE_S:
                raise Fault(f"busy for {PATIENCE_S:.0f} s ({status_line(response)})", certain=True)
            await asyncio.sleep(pause)
            delay = min(2 * delay, LONGEST_DELAY_S)

    async def send(self, method: str, path: str, body: Any, timeout: float) -> httpx2.Response:
        async with faults(timeout):
            return await self.client.request(method, path, json=body)


@contextlib.asynccontextmanager
async def faults(timeout: float) -> AsyncIterator[None]:
    """What goes wrong within the block on the way to a server and back, as a `Fault`; so does its `timeout`."""
    try:
        async with asyncio.timeout(timeout):
            yield
    except TimeoutError as error:
        raise Fault(f"no answer within {timeout:g} s") from error
    except (httpx2.ConnectError, httpx2.ConnectTimeout) as error:
        raise Fault(f"no connection ({_cause(error)})", certain=True) from error
    except httpx2.HTTPError as error:
        raise Fault(f"{type(error).__name__}: {error}".rstrip(": ")) from error


def _cause(error: BaseException) -> str:
    """What the operating system said, under what was made of it."""
    while deeper := error.__cause__ or error.__context__:
        error = deeper
    return os.strerror(error.errno) if isinstance(error, OSError) and (error.errno or 0) > 0 else str(error)


def jittered(delay: float) -> float:
    """Tries of many requests do not come at one time."""
    return delay * random.uniform(0.75, 1.25)


def _retry_after(response: httpx2.Response) -> float | None:
    """Seconds, from a number or a date; None where there is neither."""
    given = response.headers.get("Retry-After", "")
    if given.isdecimal():
        return float(given)
    try:
        return max(email.utils.parsedate_to_datetime(given).timestamp() - time.time(), 0.0)
    except ValueError:
        return None


def refuse(response: httpx2.Response) -> None:
    """Raises `Refused` for a status that says that the request is to blame. The response has been read."""
    status = response.status_code
    if 400 <= status < 500 and status not in (*_SERVER_IS_WRONG, *_PASSES):
        raise Refused(f"refused by the server: {status_line(response)}")


def json_value(response: httpx2.Response) -> Any:
    """Raises `Fault` for an error and for what is no JSON."""
    if response.status_code != 200:
        raise Fault(status_line(response), certain=response.status_code in _SERVER_IS_WRONG)
    value = parse_line(response.content)
    if isinstance(value, ValueError):
        raise Fault("an answer that is not JSON")
    return value


def _answer(response: httpx2.Response) -> Answer:
    refuse(response)
    value = json_value(response)
    try:
        [choice] = value["choices"]
        message, finish_reason = choice["message"], choice["finish_reason"]
        content, reasoning = message["content"], message.get("reasoning_content")
        usage = value.get("usage") or {}
        tokens, prompt_tokens = usage.get("completion_tokens"), usage.get("prompt_tokens")
    except (TypeError, KeyError, ValueError, AttributeError) as error:
        raise Fault("an answer without a message") from error
    if content is None and reasoning:  # of an answer cut while the model thinks
        content = ""
    if not isinstance(content, str) or not isinstance(reasoning, str | None):
        raise Fault("an answer without text")
    if finish_reason not in ("stop", "length"):  # "abort" of a server that is going down
        raise Fault(f"an answer that ended by {finish_reason!r}")
    counts = [count if type(count) is int else None for count in (tokens, prompt_tokens)]
    return Answer(content, reasoning, finish_reason, *counts)


def status_line(response: httpx2.Response) -> str:
    """The status and what an error says, in one line."""
    value: Any = parse_line(response.content)
    if isinstance(value, dict):
        error = value.get("error", value)
        value = error.get("message", error.get("detail", "")) if isinstance(error, dict) else error
    else:
        value = response.text
    return " ".join(f"{response.status_code} {response.reason_phrase}: {value}".split())[:300].rstrip(": ")
