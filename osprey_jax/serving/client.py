"""SGLang's own interface: a completion of token ids with what it took, and what the server says of itself."""

import dataclasses
import time
from typing import Any

from osprey_jax.data.records import parse_line
from osprey_jax.decoding.endpoint import PROBE_S, Endpoint, Fault, Refused, faults, json_value, refuse

_FLUSH_S = 60.0
_SHOWN = 300  # characters of what a server says of an error


@dataclasses.dataclass(frozen=True)
class Served:
    """A completion. Times in seconds from sending the request.

    Attributes:
      token_ids: the stop token included where it ended the request.
      text: without it.
      verifications, histogram: None without speculation, and where the first token ended the request. `histogram[i]`
        is the number of verifications that accepted i drafted tokens.
      first, first_tokens: when the first tokens came, and how many; `seconds`: when the last came.
    """

    token_ids: list[int]
    text: str
    finish_reason: str
    verifications: int | None
    histogram: list[int] | None
    first: float
    first_tokens: int
    seconds: float


class SGLangServer(Endpoint):
    """Requests that would fit a chat are not rendered by the server: it is asked with token ids."""

    def __init__(self, url: str, timeout: float, key: str | None = None):
        """`key`: what the server was started with as `--api-key`; else that of the environment, as in `Endpoint`."""
        super().__init__(url, timeout)
        if key is not None:
            self.client.headers["Authorization"] = f"Bearer {key}"

    async def info(self) -> dict[str, Any]:
        """What the server was started with, as it says. Raises `Fault`."""
        response = await self.send("GET", "/server_info", None, PROBE_S)
        value = json_value(response)
        if not isinstance(value, dict) or "model_path" not in value:
            raise Fault("says nothing of a model; is it SGLang?", certain=True)
        return value

    async def flush(self) -> None:
        """Forget the prompts of before, so that none is answered faster for having been asked. Raises `Fault`."""
        response = await self.send("POST", f"/flush_cache?timeout={_FLUSH_S / 2:g}", None, _FLUSH_S)
        if response.status_code != 200:
            raise Fault("does not empty its cache; is it also used by others?")

    async def complete(self, prompt: list[int], limit: int, *, speculates: bool, incremental: bool) -> Served:
        """A greedy completion of at most `limit` tokens.

        Args:
          speculates: the server does, so that an answer without verifications is none.
          incremental: the server sends what is new (0.5.23's `--incremental-streaming-output`), not all there is.

        Raises:
          Refused, Fault.
        """
        sampling = {"temperature": 0, "max_new_tokens": limit, "repetition_penalty": 1.0}
        body = {"input_ids": prompt, "sampling_params": sampling, "stream": True}
        start = time.monotonic()
        first, first_tokens, last, token_ids, text = None, 0, b"", [], ""
        async with faults(self.timeout), self.client.stream("POST", "/generate", json=body) as response:
            if response.status_code != 200:
                await response.aread()
                refuse(response)
                json_value(response)  # raises
            async for line in response.aiter_lines():
                if not line.startswith("data: ") or line == "data: [DONE]":
                    continue
                last = line.removeprefix("data: ").encode()
                if first is None or incremental:  # the others are parts of the last
                    chunk = _chunk(last)
                    token_ids += chunk["output_ids"]
                    text += chunk["text"] or ""
                    if first is None and token_ids:
                        first, first_tokens = time.monotonic() - start, len(token_ids)
        seconds = time.monotonic() - start
        chunk = _chunk(last)
        if not incremental:
            token_ids, text = chunk["output_ids"], chunk["text"] or ""
        served = _served(chunk["meta_info"], token_ids, text, first, first_tokens, seconds)
        if speculates and len(token_ids) > 1 and not served.verifications:
            raise Fault(f"an answer of {len(token_ids)} tokens without a verification")
        return served


def _chunk(line: bytes) -> dict[str, Any]:
    """`output_ids`, `text` and `meta_info` of a part of an answer."""
    if not line:
        raise Fault("an answer without a word")
    value = parse_line(line)
    if isinstance(value, dict) and isinstance(error := value.get("error"), dict):
        message = _one_line(f"{error.get('code')}: {error.get('message')}")
        raise Refused(f"refused by the server: {message}") if error.get("code") == 400 else Fault(message)
    if not isinstance(value, dict) or not isinstance(value.get("meta_info"), dict):
        raise Fault("an answer that is not SGLang's")
    ids, text = value.get("output_ids"), value.get("text")
    if not _counts(ids) or not isinstance(text, str | None):
        raise Fault("an answer without token ids")
    return value


def _served(
    meta: dict[str, Any],
    token_ids: list[int],
    text: str,
    first: float | None,
    first_tokens: int,
    seconds: float,
) -> Served:
    reason = meta.get("finish_reason")
    kind = reason.get("type") if isinstance(reason, dict) else None
    if kind is None:
        raise Fault("an answer that breaks off")
    if kind not in ("stop", "length"):
        raise Fault(_one_line(f"an answer that ended by {kind!r}: {reason.get('message', '')}"))
    if first is None or meta.get("completion_tokens") != len(token_ids):
        raise Fault(f"an answer of {len(token_ids)} token ids that counts {meta.get('completion_tokens')} tokens")
    verifications = meta.get("spec_verify_ct")
    histogram = meta.get("spec_correct_drafts_histogram", meta.get("spec_accept_histogram"))  # 0.5.23, 0.5.9
    if not _counts([0 if verifications is None else verifications]) or not (histogram is None or _counts(histogram)):
        raise Fault("an answer whose verifications are no numbers")
    if not (verifications or 0) <= len(token_ids):
        raise Fault(f"an answer of {len(token_ids)} tokens that counts {verifications} verifications")
    return Served(token_ids, text, kind, verifications, histogram, first, first_tokens, seconds)


def _counts(values: Any) -> bool:
    """Whether they are a list of numbers from 0, small enough for tokenizers."""
    return isinstance(values, list) and all(type(value) is int and 0 <= value < 2**31 for value in values)


def _one_line(text: str) -> str:
    return " ".join(text.split())[:_SHOWN].rstrip(": ")
