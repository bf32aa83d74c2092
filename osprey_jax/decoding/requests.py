"""Requests and how they share batches: stop tokens, limits, rows of equal shape."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import transformers

from osprey_jax.command import UserError
from osprey_jax.files import read_json

PREFILL_CHUNK = 512  # prompt tokens read at a time: bounds the attention scores of a long prompt


@dataclasses.dataclass(frozen=True)
class Request:
    """A prompt, and how many tokens may follow it."""

    prompt: list[int]
    limit: int
    record: int = 0  # with `turn`, what makes a sampled request's random numbers its own
    turn: int = 0


@dataclasses.dataclass(frozen=True)
class Completion:
    """Generated ids, the stop token included where it ended the request."""

    token_ids: list[int]
    finish_reason: Literal["stop", "length"]


class Batch(NamedTuple):
    """Requests as rows: prompts right-padded to P. A row beyond the requests has limit 0 and is never decoded."""

    prompt_BxP: np.ndarray
    lengths_B: np.ndarray
    limits_B: np.ndarray
    records_B: np.ndarray
    turns_B: np.ndarray
    stop_ids: np.ndarray


def make_batch(requests: Sequence[Request], stop_ids: Sequence[int], vocab_size: int, rows: int) -> Batch:
    """Rows of a shape out of few, so that few programs are compiled.

    Raises:
      UserError: a prompt is empty, or holds an id that the model has no embedding for.
    """
    for request in requests:
        if not request.prompt:
            raise UserError("a prompt renders to no token; check the tokenizer and its chat template")
        if max(request.prompt) >= vocab_size:
            raise UserError(f"a prompt holds token {max(request.prompt)}, the model has {vocab_size}: wrong tokenizer")
    padded = [*requests, *[Request([0], limit=0)] * (rows - len(requests))]
    prompt_BxP = np.zeros((len(padded), prompt_bucket(max(len(r.prompt) for r in padded))), np.int32)
    for row, request in zip(prompt_BxP, padded, strict=True):
        row[: len(request.prompt)] = request.prompt
    return Batch(
        prompt_BxP,
        np.array([len(r.prompt) for r in padded], np.int32),
        np.array([r.limit for r in padded], np.int32),
        np.array([r.record for r in padded], np.uint32),
        np.array([r.turn for r in padded], np.uint32),
        np.array(stop_ids, np.int32),
    )


def prompt_bucket(length: int) -> int:
    """Powers of two from 32 to the chunk, then multiples of the chunk."""
    if length > PREFILL_CHUNK:
        return -(-length // PREFILL_CHUNK) * PREFILL_CHUNK
    return max(32, 1 << (length - 1).bit_length())


def limit_bucket(limit: int) -> int:
    """The places that `limit` new tokens are given: a multiple of 32."""
    return -(-limit // 32) * 32


def by_length(lengths: Sequence[int], batch_size: int) -> list[list[int]]:
    """Indices in groups of at most `batch_size`, alike in length; ties stay in order."""
    order = sorted(range(len(lengths)), key=lambda i: lengths[i])
    return [order[i : i + batch_size] for i in range(0, len(order), batch_size)]


def stop_token_ids(target: Path, tokenizer: transformers.PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Ids that end a turn: those of `config.json`, of `generation_config.json` and the tokenizer's, all together.

    As SGLang 0.5.23 does (`ModelConfig._get_hf_eos_token_id`, `Req._check_token_based_finish`).
    """
    ids: set[int] = set()
    for name in ("config.json", "generation_config.json"):
        if (target / name).is_file():
            value = read_json(target / name).get("eos_token_id")
            value = value if isinstance(value, list) else [] if value is None else [value]
            if not all(type(i) is int and i >= 0 for i in value):
                raise UserError(f"{target / name}: eos_token_id {value} is not a token id or a list of them")
            ids |= set(value)
    if tokenizer.eos_token_id is not None:
        ids.add(tokenizer.eos_token_id)
    if not ids:
        raise UserError(f"{target}: neither the configs nor the tokenizer name an end-of-turn token (eos_token_id)")
    return tuple(sorted(ids))


def settle(
    count_B: jax.Array, new_BxJ: jax.Array, num_new_B: jax.Array, limits_B: jax.Array, stop_ids: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Which of a step's new tokens a request keeps: up to its limit and up to its first stop token, inclusive.

    Args:
      count_B: tokens the request had. num_new_B: how many of `new_BxJ` are new.

    Returns:
      (count_B after the step, stopped_B, done_B).
    """
    j_J = jnp.arange(new_BxJ.shape[1])
    kept_BxJ = (j_J < num_new_B[:, None]) & (count_B[:, None] + j_J < limits_B[:, None])
    stops_BxJ = kept_BxJ & jnp.any(new_BxJ[..., None] == stop_ids, axis=-1)
    stopped_B = jnp.any(stops_BxJ, axis=-1)
    num_kept_B = jnp.where(stopped_B, jnp.argmax(stops_BxJ, axis=-1) + 1, jnp.sum(kept_BxJ, axis=-1))
    count_B = count_B + num_kept_B
    return count_B, stopped_B, stopped_B | (count_B >= limits_B)
