"""Drafters measured in this process: the target writes alone, then with each of them."""

import functools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from tqdm import tqdm

from osprey_jax.command import UserError
from osprey_jax.config import EvaluateConfig
from osprey_jax.decoding.generate import generate
from osprey_jax.decoding.requests import Request, by_length
from osprey_jax.decoding.speculate import speculate
from osprey_jax.decoding.target import Target, open_target
from osprey_jax.evaluation.measurement import facts
from osprey_jax.evaluation.prompts import Item, PromptSet, fingerprint, next_turns
from osprey_jax.files import fingerprint as files_fingerprint
from osprey_jax.files import read_json, write_text
from osprey_jax.models.drafter import Drafter
from osprey_jax.models.hf import load_drafter
from osprey_jax.models.hf_config import check_fits_target, check_tap_layers, drafter_config

Result = TypeVar("Result")


class Engine:
    """Decoding in JAX, a batch at a time: no times, since a batch ends with its longest request."""

    def __init__(self, config: EvaluateConfig):
        """Raises `UserError`: unusable checkpoints, a drafter made for another target."""
        self._config = config
        self.chat = self._target = open_target(config.target, config.template_options)
        self._taps = {name: _check_drafter(path, self._target) for name, path in config.drafters.items()}
        self._dtype = jnp.dtype(config.compute_dtype)
        self._options = {"stop_ids": self._target.stop_ids, "rows": config.batch_size, "dtype": self._dtype}
        # Read when first needed: all parts may be there already.
        self._load_target = functools.cache(lambda: self._target.load(self._dtype))

    def measure(self, sets: list[PromptSet], parts: Path) -> list[dict[str, Any]]:
        """A result for each drafter on each set, from `parts` or made now."""
        config = self._config
        keys = {"max_new_tokens", "template_options", "compute_dtype"}
        settings = config.model_dump(mode="json", include=keys) | {"stop_ids": list(self._target.stop_ids)}
        settings["target"] = files_fingerprint(config.target)
        own = {prompts.name: self._write_alone(prompts, parts, settings) for prompts in sets}
        results = []
        for name, path in config.drafters.items():
            load = functools.cache(functools.partial(load_drafter, path, dtype=self._dtype))
            of_drafter = {
                "drafter": files_fingerprint(path),
                "taps": self._taps[name],
                "draft_steps": config.draft_steps,
            }
            for prompts in sets:
                items, own_ids = own[prompts.name]
                made = _part(
                    parts / f"{name}@{prompts.name}.json",
                    settings | of_drafter | {"prompts": fingerprint(items)},
                    functools.partial(self._speak, prompts, items, own_ids, name, load),
                )
                results.append({
                    "arm": name, "prompts": prompts.name, "concurrency": None, "busy_seconds": None,
                    "requests": made, "failures": [],
                })  # fmt: skip
        return results

    def facts(self) -> dict[str, Any]:
        """The machine that measured."""
        device = jax.devices()[0]
        return {"device": device.platform, "name": device.device_kind, "gpus": None if device.platform == "cpu" else 1}

    def _write_alone(
        self, prompts: PromptSet, parts: Path, settings: dict[str, Any]
    ) -> tuple[list[Item], list[list[int]]]:
        """All turns of a set, each after the target's own answers, and what it writes to them."""
        everything: tuple[list[Item], list[list[int]]] = [], []
        items, turn = prompts.items, 0
        while items:
            requests = [item.request for item in items]
            title = f"target alone: {prompts.name}" + (f", turn {turn}" if turn else "")
            ids = _part(
                parts / (f"{prompts.name}.turn{turn}.json" if turn else f"{prompts.name}.json"),
                settings | {"prompts": fingerprint(items)},
                functools.partial(self._generated, requests, title),
            )
            everything[0].extend(items)
            everything[1].extend(ids)
            texts = [self._target.text(token_ids) for token_ids in ids]
            items, turn = next_turns(prompts, items, texts, self._config, self._target), turn + 1
        return everything

    def _generated(self, requests: list[Request], title: str) -> list[list[int]]:
        complete = functools.partial(generate, self._load_target(), **self._options)
        return [made.token_ids for made in _batched(requests, complete, self._config.batch_size, title)]

    def _speak(
        self, prompts: PromptSet, items: list[Item], own: list[list[int]], name: str, load: Callable[[], Drafter]
    ) -> list[dict[str, Any]]:
        complete = functools.partial(
            speculate,
            self._load_target(),
            load(),
            tap_layers=self._taps[name],
            draft_steps=self._config.draft_steps,
            **self._options,
        )
        requests = [item.request for item in items]
        found = _batched(requests, complete, self._config.batch_size, f"{name}: {prompts.name}")
        return [
            facts(
                item,
                speculation.completion.token_ids,
                speculation.completion.finish_reason,
                verifications=speculation.verifications,
                histogram=speculation.histogram,
                text=self._target.text(speculation.completion.token_ids),
                own_ids=own_ids,
                decode=self._target.tokenizer.decode,
            )
            for item, speculation, own_ids in zip(items, found, own, strict=True)
        ]


def _check_drafter(path: Path, target: Target) -> tuple[int, int, int]:
    """The drafter's tap layers, if it fits the target."""
    drafter = drafter_config(path)
    check_fits_target(drafter, target.config, str(path))
    try:
        return check_tap_layers(drafter.tap_layers, target.config.num_layers)
    except UserError as error:
        raise UserError(f"{path}: {error}") from error


def _part(path: Path, fingerprint: dict[str, Any], make: Callable[[], list]) -> list:
    """What `make` gives, kept in `path` for later runs with the same fingerprint."""
    fingerprint = json.loads(json.dumps(fingerprint))
    if path.is_file():
        kept = read_json(path)
        if kept.get("fingerprint") == fingerprint:
            return kept["values"]
    values = make()
    write_text(path, json.dumps({"fingerprint": fingerprint, "values": values}, ensure_ascii=False) + "\n")
    return values


def _batched(
    requests: Sequence[Request], complete: Callable[[list[Request]], list[Result]], batch_size: int, title: str
) -> list[Result]:
    """`complete` on batches alike in length; results in the order of `requests`."""
    results: dict[int, Result] = {}
    with tqdm(total=len(requests), desc=title, unit=" prompts", disable=None) as bar:
        for group in by_length([len(request.prompt) for request in requests], batch_size):
            results |= zip(group, complete([requests[i] for i in group]), strict=True)
            bar.update(len(group))
    return [results[i] for i in range(len(requests))]
