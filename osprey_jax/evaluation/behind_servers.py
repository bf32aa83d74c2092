"""Arms measured behind SGLang: a server for each, that runs already or is started here, one after another."""

import contextlib
import functools
import hashlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from osprey_jax.command import UserError, run_async
from osprey_jax.config import OFF, EvaluateConfig
from osprey_jax.data.rendering import ChatTemplate
from osprey_jax.data.tokenizer import load_tokenizer
from osprey_jax.decoding.chat import Chat
from osprey_jax.decoding.endpoint import Fault
from osprey_jax.decoding.journal import Journal
from osprey_jax.evaluation.hardware import machine
from osprey_jax.evaluation.load import KEPT, Load, key_of
from osprey_jax.evaluation.measurement import busy_seconds, facts
from osprey_jax.evaluation.prompts import Item, PromptSet, fingerprint, next_turns
from osprey_jax.files import fingerprint as files_fingerprint
from osprey_jax.files import read_json
from osprey_jax.serving.client import SGLangServer
from osprey_jax.serving.launch import Launch, installed_version, plan_launch
from osprey_jax.serving.process import free_port, running

# Of what a server says of itself, what its figures depend on.
_FACTS = ("version", "model_path", "dtype", "quantization", "kv_cache_dtype", "device", "tp_size", "pp_size", "dp_size")
_FACTS += ("speculative_algorithm", "speculative_draft_model_path", "speculative_num_steps", "speculative_eagle_topk")
_FACTS += ("speculative_num_draft_tokens", "attention_backend", "disable_radix_cache", "enable_deterministic_inference")
_CHOSEN = ("max_running_requests", "cuda_graph_max_bs", "mem_fraction_static")  # by the memory that a server finds free
_NUMBERS = ("tp_size", "pp_size", "dp_size", "max_running_requests")  # with which is reckoned here


class Engine:
    """Every arm on every set at every level of concurrency; each request is kept as soon as it is answered."""

    def __init__(self, config: EvaluateConfig):
        """Raises `UserError`: unusable tokenizer; no SGLang where it is said to be; what none could be started with."""
        self._config = config
        raw = read_json(config.target / "config.json")
        raw = raw.get("text_config", raw)  # of models that also see
        context = raw.get("max_position_embeddings")
        if type(context) is not int:
            raise UserError(f"{config.target / 'config.json'}: max_position_embeddings is {context!r}, not a number")
        tokenizer = load_tokenizer(config.target)
        self.chat = Chat(tokenizer, ChatTemplate(tokenizer, config.template_options), context)
        self._version = None if config.sglang_python is None else installed_version(config.sglang_python)
        arms = [OFF, *config.drafters] if OFF in config.servers or config.sglang_python else [*config.drafters]
        self._arms = arms
        for arm in arms:
            if arm not in config.servers:
                self.launch(arm)  # what is wrong with the last arm should not be found after the first was measured
        self._servers: dict[str, dict[str, Any]] = {}  # arm -> what its server says
        self._fingerprint = functools.cache(files_fingerprint)

    def launch(self, arm: str) -> Launch:
        """How to start the server of an arm, on a port that is free now. Raises `UserError`."""
        config = self._config
        if wrong := [item for item in config.sglang_arguments if item.startswith("--speculative-num")]:
            raise UserError(f"sglang_arguments: {wrong[0]} is draft_steps' to say, for all arms alike")
        return plan_launch(
            config.target,
            config.drafters.get(arm),
            python=config.sglang_python,
            draft_steps=config.draft_steps,
            arguments=[*config.sglang_arguments, "--port", str(free_port())],
        )

    def facts(self) -> dict[str, Any]:
        """The machines that measured: as the servers tell, and this one where it started them."""
        told = next(iter(self._servers.values()))
        sizes = [told.get(key) or 1 for key in ("tp_size", "pp_size", "dp_size")]
        gpus = None if told.get("device") == "cpu" else sizes[0] * sizes[1] * sizes[2]
        here = machine() if self._config.sglang_python else {}
        return {"device": told.get("device"), "gpus": gpus, **here, "servers": self._servers}

    def measure(self, sets: list[PromptSet], folder: Path) -> list[dict[str, Any]]:
        """A result for each arm, level and set, from `folder` or asked now."""
        if OFF not in self._arms and any(prompts.later_turns for prompts in sets):
            print(f"warning: no server for {OFF}: of several turns, the first alone are asked", file=sys.stderr)
        asked: dict[str, list[list[Item]]] = {prompts.name: [prompts.items] for prompts in sets}
        complete = [_Arm(self, arm, sets, asked, folder).measure() for arm in self._arms]
        own = (
            {(part["prompts"], part["concurrency"]): part["answers"] for part in complete[0]}
            if self._arms[0] == OFF
            else {}
        )
        return [
            self._result(part, own.get((part["prompts"], part["concurrency"]), {})) for arm in complete for part in arm
        ]

    def _result(self, part: dict[str, Any], own: dict[str, dict]) -> dict[str, Any]:
        requests, failures, intervals = [], [], []
        for item in part["items"]:
            entry = part["answers"][key_of(item)]
            intervals += entry["intervals"]
            in_vain = entry["intervals"] if "failed" in entry else entry["intervals"][:-1]
            lost = {
                "attempts": len(entry["intervals"]),
                "lost_seconds": sum((end - start for start, end in in_vain), 0.0),
            }
            if "failed" in entry:
                failures.append(item.name | lost | {"reason": entry["failed"], "refused": entry["for_good"]})
                continue
            speculates = part["arm"] != OFF
            rest, decoding = len(entry["token_ids"]) - entry["first_tokens"], entry["seconds"] - entry["first"]
            made = facts(
                item,
                entry["token_ids"],
                entry["finish_reason"],
                verifications=entry["verifications"] or 0 if speculates else None,
                histogram=entry["histogram"] or [] if speculates else None,
                text=entry["text"],
                own_ids=own.get(key_of(item), {}).get("token_ids") if speculates else None,
                decode=self.chat.tokenizer.decode,
                times={
                    "seconds": entry["seconds"],
                    "time_to_first_token": entry["first"],
                    "milliseconds_per_token": 1e3 * decoding / rest if rest > 0 else None,
                },
                **lost,
            )
            requests.append(made)
        names = {key: part[key] for key in ("arm", "prompts", "concurrency")}
        busy = busy_seconds([tuple(interval) for interval in intervals])
        return names | {"busy_seconds": busy, "requests": requests, "failures": failures}


class _Arm:
    """One arm while it is measured."""

    def __init__(
        self, engine: Engine, name: str, sets: list[PromptSet], asked: dict[str, list[list[Item]]], parts: Path
    ):
        self._engine, self._config, self.name, self._sets = engine, engine._config, name, sets
        self._asked = asked  # by set: the items of each turn; grows when `off` is measured first
        self._parts = parts
        self._before: dict[str, Any] | None = None  # what its server said of itself

    def measure(self) -> list[dict[str, Any]]:
        """Its parts. Starts or reaches its server only where something is missing."""
        journals = {
            (prompts.name, level): self._journal(prompts, level)
            for level in self._config.concurrency
            for prompts in self._sets
        }
        try:
            if self._missing(journals):
                with self._server() as (url, key, ended):
                    run_async(self._ask(SGLangServer(url, self._config.timeout, key), ended, journals))
            self._engine._servers[self.name] = self._told(journals)
            return [
                {
                    "arm": self.name,
                    "prompts": prompts,
                    "concurrency": level,
                    "items": [item for turn in self._asked[prompts] for item in turn],
                    "answers": {key_of(i): journal.read(key_of(i)) for turn in self._asked[prompts] for i in turn},
                }
                for (prompts, level), journal in journals.items()
            ]
        finally:
            for journal in journals.values():
                journal.close()

    def _journal(self, prompts: PromptSet, level: int) -> Journal:
        """Other settings, another file: what was measured before is not lost."""
        config, path = self._config, self._config.drafters.get(self.name)
        settings = {
            "prompts": fingerprint(prompts.items),
            "target": self._engine._fingerprint(config.target),
            "drafter": None if path is None else self._engine._fingerprint(path) if path.is_dir() else str(path),
            "draft_steps": None if path is None else config.draft_steps,
            "concurrency": level,
            "server": "running" if self.name in config.servers else [self._engine._version, config.sglang_arguments],
        }
        digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:8]
        return Journal(self._parts / f"{self.name}@{prompts.name}@{level}.{digest}.jsonl", settings)

    def _missing(self, journals: dict[tuple[str, int], Journal]) -> bool:
        """Whether anything is to be asked still; what failed is. Finds the later turns where all before is there."""
        for (name, level), journal in journals.items():
            prompts = next(prompts for prompts in self._sets if prompts.name == name)
            for turn in self._turns(prompts, journal, level):
                if any(not answered(journal, item) for item in turn):
                    return True
        return False

    def _turns(self, prompts: PromptSet, journal: Journal, level: int) -> Iterator[list[Item]]:
        """The items of each turn. Speculation off, at the first level, answers one before there is a next."""
        turns, decides = self._asked[prompts.name], self.name == OFF and level == self._config.concurrency[0]
        number = 0
        while number < len(turns):
            yield turns[number]
            number += 1
            if decides and number == len(turns):
                texts = [(journal.read(key_of(item)) or {}).get("text") for item in turns[-1]]
                engine = self._engine
                if following := next_turns(prompts, turns[-1], texts, self._config, engine.chat):
                    turns.append(following)

    @contextlib.contextmanager
    def _server(self):
        """(url, its key or None, what says how the server ended or None) of this arm's server."""
        config, running_url = self._config, self._config.servers.get(self.name)
        if running_url is not None:
            yield running_url, None, lambda: None
            return
        launch = self._engine.launch(self.name)
        log = config.out / "servers" / f"{self.name}.log"
        log.parent.mkdir(exist_ok=True)
        print(f"{self.name}: starting a server ({log})\n{launch}", file=sys.stderr, flush=True)
        with running(launch, log=log, start_timeout=config.start_timeout) as process:
            yield (
                launch.url,
                launch.api_key,
                lambda: None if process.poll() is None else f"ended with status {process.returncode} ({log})",
            )

    async def _ask(
        self, server: SGLangServer, ended: Callable[[], str | None], journals: dict[tuple[str, int], Journal]
    ) -> None:
        load = Load(self.name, server, ended, self._same)
        try:
            told = await load.until_back()
            for journal in journals.values():  # before anything is asked
                self._check_server(journal, told)
            for (name, level), journal in journals.items():
                prompts = next(prompts for prompts in self._sets if prompts.name == name)
                if journal.read("server") is None:
                    journal.add({"key": "server", "told": told})
                if level > (places := told.get("max_running_requests", level)):
                    print(f"warning: {self.name}: takes {places} requests at one time, not {level}", file=sys.stderr)
                for number, items in enumerate(self._turns(prompts, journal, level)):
                    left = [item for item in items if not answered(journal, item)]
                    if left:
                        title = f"{self.name}: {name}, {level} at a time" + (f", turn {number}" if number else "")
                        await load.ask(left, level, journal, title, done=len(items) - len(left))
        finally:
            await server.close()

    def _same(self, info: dict[str, Any]) -> dict[str, Any]:
        """What `info` says, where the server is this arm's. Raises `UserError`, or `Fault` where it says nothing."""
        config = self._config
        algorithm, steps = info.get("speculative_algorithm"), info.get("speculative_num_steps")
        if self.name == OFF and algorithm:
            raise UserError(f"servers.{OFF}: speculates ({algorithm}); start one without")
        if self.name != OFF and not algorithm:
            raise UserError(f"servers.{self.name}: does not speculate; start it with `python -m export.serve`")
        if self.name != OFF and steps != config.draft_steps:
            raise UserError(f"servers.{self.name}: drafts {steps} steps, draft_steps is {config.draft_steps}")
        if self.name != OFF and (width := info.get("speculative_eagle_topk")) not in (None, 1):
            raise UserError(
                f"servers.{self.name}: drafts trees (top-k {width}); start it with `python -m export.serve`"
            )
        if info.get("skip_tokenizer_init"):
            raise UserError(f"servers.{self.name}: writes no text; start it without --skip-tokenizer-init")
        if info.get("stream_output"):  # which gives new tokens beside the whole text, and loses tokens under load
            raise UserError(f"servers.{self.name}: streams as 0.5.9 does wrongly; start it without --stream-output")
        told = {key: info[key] for key in (*_FACTS, *_CHOSEN) if info.get(key) is not None}
        if not isinstance(told.get("version"), str):
            raise Fault("does not tell its version")
        if wrong := [key for key in _NUMBERS if type(told.get(key, 1)) is not int]:
            raise Fault(f"says that its {wrong[0]} is {str(told[wrong[0]])[:100]!r}, which is no number")
        if self._before is None and self.name in config.servers:
            self._warn_of_names(told)
        if self._before and (changed := _changed(self._before, told)):
            raise UserError(f"{self.name}: came back as a server with another {changed}; {KEPT}")
        self._before = told
        return told

    def _warn_of_names(self, told: dict[str, Any]) -> None:
        """A server elsewhere has its files in other places, but hardly under other names."""
        served = {"model_path": self._config.target}
        served |= {} if self.name == OFF else {"speculative_draft_model_path": self._config.drafters[self.name]}
        for key, path in served.items():
            if (name := Path(str(told.get(key, ""))).name) != path.resolve().name:
                print(f"warning: servers.{self.name}: serves {name}; the config says {path}", file=sys.stderr)

    def _check_server(self, journal: Journal, told: dict[str, Any]) -> None:
        """What is measured in several runs, is measured on one kind of server."""
        before = journal.read("server")
        if before is not None and (changed := _changed(before["told"], told)):
            raise UserError(
                f"{journal.path}: was begun on a server with another {changed}; go on with that, or remove the file "
                "to measure it anew"
            )

    def _told(self, journals: dict[tuple[str, int], Journal]) -> dict[str, Any]:
        """What the server of all of them said of itself."""
        told = next(iter(journals.values())).read("server")["told"]
        for journal in journals.values():
            self._check_server(journal, told)
        return told


def _changed(before: dict[str, Any], now: dict[str, Any]) -> str:
    """Names of what a server says otherwise than before."""
    return ", ".join(key for key in _FACTS if before.get(key) != now.get(key))


def answered(journal: Journal, item: Item) -> bool:
    """Also where the server refused it for good."""
    key = key_of(item)
    return key in journal and (key not in journal.failed or journal.read(key)["for_good"])
