"""Typed configs: a YAML file, then `key=value` overrides; an unknown or contradictory key is an error.

One class a command. A default stands here and nowhere else; what follows from other values is computed by the code
that needs it and printed at the start of a run, never a second key.
"""

import argparse
import re
import urllib.parse
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import pydantic
import yaml

from osprey_jax.command import ArgumentParser, UserError

Positive = Annotated[int, pydantic.Field(ge=1, strict=True)]
Seed = Annotated[int, pydantic.Field(ge=0, lt=2**32, strict=True)]  # what a random key is made of
TemplateOptions = dict[str, pydantic.JsonValue]  # passed to the chat template, as serving does (enable_thinking: false)
Decay = Annotated[float, pydantic.Field(ge=0, lt=1)]
Seconds = Annotated[float, pydantic.Field(gt=0)]


def _base_url(server: str) -> str:
    url = server.rstrip("/").removesuffix("/v1")
    try:
        port = urllib.parse.urlsplit(url).port  # raises where it is none, or an IPv6 address is unfinished
    except ValueError:
        port = 0
    if port == 0 or not re.fullmatch(r"https?://[^/\s?#]+(/[^\s?#]*)?", url):
        raise ValueError(f"{url!r} is no base URL such as http://host:30000")
    return url


BaseURL = Annotated[str, pydantic.AfterValidator(_base_url)]  # http://host:30000


class Section(pydantic.BaseModel):
    """A group of keys. Unknown keys are refused, values cannot change."""

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


# ---- parts of a training run


class Data(Section):
    """Text: documents in full rows."""

    train: list[str]  # files or globs
    eval: list[str] = []  # held-out files or globs
    length: Annotated[int, pydantic.Field(ge=2, strict=True)]  # tokens a row
    cache_dir: Path = Path("runs/prepared")  # where prepared rows are kept, for all runs that need the same
    processes: Positive | None = None  # that prepare; None: all cores


class Conversations(Data):
    """Conversations through the target's chat template."""

    packing: bool = True  # several conversations a row (best fit), none sees another; false: one a row
    only_last_turn: bool = False  # of a conversation only the assistant's last turn is supervised
    template_options: TemplateOptions = {}


class Optimizer(Section):
    learning_rate: Annotated[float, pydantic.Field(gt=0)]
    warmup_fraction: Annotated[float, pydantic.Field(ge=0, le=1)] = 0.04  # of the steps, linear; then cosine to 0
    beta1: Decay = 0.9
    beta2: Decay = 0.999
    epsilon: Annotated[float, pydantic.Field(gt=0)] = 1e-8
    weight_decay: Annotated[float, pydantic.Field(ge=0)] = 0.0
    clip_norm: Annotated[float, pydantic.Field(gt=0)] = 1.0


class Mesh(Section):
    data: Positive | None = None  # None: all devices / tensor
    tensor: Positive = 1


class Checkpoints(Section):
    every: Positive = 1000  # steps; the last step is always saved
    keep: Positive = 3


class TTT(Section):
    """Test-time training (EAGLE-3): the unroll, which positions it supervises, how a step's sum is normalised."""

    length: Positive = 5
    decay: Annotated[float, pydantic.Field(gt=0)] = 0.8
    supervision: Literal["released", "exact"] = "released"
    normalization: Literal["sequence", "token"] = "sequence"
    loss_chunk: Positive = 512  # positions whose logits exist at one time; changes memory, never a number


class Run(Section):
    """What both stages share."""

    run_dir: Path
    seed: Seed = 0
    data: Data
    optimizer: Optimizer
    batch_size: Positive  # rows an optimizer step, over all devices and accumulated parts
    accumulation: Positive = 1  # parts a batch is computed in, one after another
    epochs: Positive | None = None
    steps: Annotated[int, pydantic.Field(ge=0, strict=True)] | None = None
    eval_every: Positive | None = None  # steps; None: only at the end
    log_every: Positive = 10
    checkpoints: Checkpoints = Checkpoints()
    mesh: Mesh = Mesh()
    compilation_cache: Path | None = None  # a directory for what XLA compiles, so that going on does not compile again
    compute_dtype: Literal["float32", "bfloat16"] = "float32"  # of products; masters, moments and loss are float32
    attention: Literal["auto", "xla", "mosaic"] = "auto"  # kernel; auto: mosaic (Hopper, B200; tokamax) where it runs
    remat: Literal["none", "mlp", "layer"] = "none"  # what the backward pass computes again, to save memory

    @pydantic.model_validator(mode="after")
    def _consistent(self) -> Self:
        if (self.epochs is None) == (self.steps is None):
            raise ValueError("give either epochs or steps")
        if self.batch_size % self.accumulation:
            raise ValueError(f"accumulation {self.accumulation} does not divide batch_size {self.batch_size}")
        if self.eval_every is not None and not self.data.eval:
            raise ValueError("eval_every is set, but data.eval names no file")
        caches = {"data.cache_dir": self.data.cache_dir, "compilation_cache": self.compilation_cache}
        for key, cache in caches.items():
            if cache is not None and cache.resolve().is_relative_to(self.run_dir.resolve()):
                raise ValueError(f"{key} {cache} lies in run_dir, which holds the run alone")
        return self


# ---- train


class ModelStart(Section):
    """A language model's start: a checkpoint, or random values for a config and its tokenizer."""

    checkpoint: Path | None = None
    config: Path | None = None  # an HF config.json
    tokenizer: Path | None = None

    @pydantic.model_validator(mode="after")
    def _one(self) -> Self:
        if (self.checkpoint is None) == (self.config is None) or (self.config is None) != (self.tokenizer is None):
            raise ValueError("give either checkpoint, or config and tokenizer")
        return self

    @property
    def numbers_from(self) -> Path:
        """The checkpoint, or the config alone."""
        return self.checkpoint or self.config

    @property
    def tokenizer_from(self) -> Path:
        """The directory with the tokenizer's files."""
        return self.checkpoint or self.tokenizer


class Scratch(Section):
    """EAGLE-3 from scratch: the baseline, with the target's embedding."""

    num_layers: Positive = 1


class DrafterStart(Section):
    """A drafter's start: a converted checkpoint, or EAGLE-3 from scratch."""

    checkpoint: Path | None = None
    scratch: Scratch | None = None
    # The head writes the tokens that the data supervises most, so many; None: as the checkpoint, else all of them.
    draft_vocab_size: Positive | None = None

    @pydantic.model_validator(mode="after")
    def _one(self) -> Self:
        if (self.checkpoint is None) == (self.scratch is None):
            raise ValueError("give either checkpoint or scratch")
        return self


class PretrainConfig(Run):
    """`train`, stage 2: next-token prediction on text."""

    stage: Literal["pretrain"]
    model: ModelStart
    loss_chunk: Positive = 512  # positions whose logits exist at one time; changes memory, never a number


class DistillConfig(Run):
    """`train`, stage 4: a drafter learns its target's distributions on conversations."""

    stage: Literal["distill"]
    data: Conversations
    target: Path
    drafter: DrafterStart
    tap_layers: tuple[int, int, int] | None = None  # blocks of the target, 0-based; None: the drafter's, else default
    ttt: TTT = TTT()
    remat: Literal["none", "mlp", "layer", "step"] = "none"  # step: each step of the unroll


TrainConfig = Annotated[PretrainConfig | DistillConfig, pydantic.Field(discriminator="stage")]


# ---- regenerate, evaluate

OFF = "off"  # the arm without speculation


class RegenerateConfig(Section):
    """`regenerate`: the target answers the user turns of conversations, in this process or behind servers."""

    target: Path  # with servers, only its tokenizer's files are read
    input: list[str]  # conversations (JSONL), files or globs
    output: Path  # JSONL
    max_new_tokens: Positive  # of one turn
    temperature: Annotated[float, pydantic.Field(ge=0)] = 0.0  # 0: greedy
    top_p: Annotated[float, pydantic.Field(gt=0, le=1)] = 1.0
    seed: Seed = 0
    template_options: TemplateOptions = {}
    # in this process
    batch_size: Positive = 8
    compute_dtype: Literal["float32", "bfloat16"] = "float32"
    # by servers
    servers: list[BaseURL] = []  # OpenAI-compatible servers of one model
    concurrency: Positive = 32  # requests that a server has at one time
    timeout: Seconds = 1800.0  # that one answer may take

    @pydantic.field_validator("servers")
    @classmethod
    def _none_twice(cls, servers: list[str]) -> list[str]:
        for url in servers:
            if servers.count(url) > 1:
                raise ValueError(f"{url} is named twice")
        return servers

    @pydantic.model_validator(mode="after")
    def _consistent(self) -> Self:
        if 0 < self.temperature < 0.01:
            raise ValueError(f"temperature {self.temperature} is neither 0, which is greedy, nor at least 0.01")
        other = ("batch_size", "compute_dtype") if self.servers else ("concurrency", "timeout")
        if wrong := [key for key in other if key in self.model_fields_set]:
            where = (
                "is of a target in this process, not of servers" if self.servers else "is of servers, and none is named"
            )
            raise ValueError(f"{' and '.join(wrong)} {where}")
        return self


class EvaluateConfig(Section):
    """`evaluate`: accepted length, latency and throughput of drafters on prompts, greedy, by chain speculation.

    What is measured are *arms*: the drafters, and `off`, the target without speculation.
    """

    engine: Literal["in_process", "sglang"] = "in_process"
    target: Path  # with running servers, its config and tokenizer files alone are read
    drafters: dict[str, Path] = {}
    prompts: dict[str, Path]  # prompt set -> conversations, or a benchmark's file
    trained_on: dict[str, list[str]] = {}  # drafter -> prompt sets of the domain that it learnt
    out: Path  # a directory
    max_new_tokens: Positive = 4096
    draft_steps: Positive = 5
    sample: Positive | None = None  # that many prompts a set, drawn at random; None: all, in file order
    seed: Seed = 0  # of the sample and of the intervals
    template_options: TemplateOptions = {}
    # in this process
    batch_size: Positive = 1
    compute_dtype: Literal["float32", "bfloat16"] = "float32"
    # by SGLang
    servers: dict[str, BaseURL] = {}  # arm -> a server that runs
    sglang_python: Path | None = None  # of an environment with SGLang: starts a server for every other arm
    sglang_arguments: list[str] = []  # of sglang.launch_server, for those ([--tp, 4])
    start_timeout: Seconds = 1800.0  # until one of those answers
    concurrency: list[Positive] = [1]  # requests at one time; each level is measured by itself, 1 is low load
    timeout: Seconds = 600.0  # that a request may take

    @pydantic.field_validator("sglang_arguments", mode="before")
    @classmethod
    def _as_text(cls, arguments: Any) -> Any:
        return [str(item) for item in arguments] if isinstance(arguments, list) else arguments

    @pydantic.model_validator(mode="after")
    def _consistent(self) -> Self:
        of_servers = ("servers", "sglang_python", "sglang_arguments", "start_timeout", "concurrency", "timeout")
        other = of_servers if self.engine == "in_process" else ("batch_size", "compute_dtype")
        if wrong := [key for key in other if key in self.model_fields_set]:
            raise ValueError(f"{' and '.join(wrong)} does nothing with engine {self.engine}")
        for name in (*self.drafters, *self.prompts):
            if not re.fullmatch(r"[\w.+-]+", name):
                raise ValueError(f"{name!r}: a drafter or prompt set is named with letters, digits and . _ + - alone")
        if OFF in self.drafters:
            raise ValueError(f"drafters: {OFF} is the name of the target without speculation")
        if not self.prompts or not (self.drafters or self.engine == "sglang"):
            raise ValueError(f"{'drafters' if self.prompts else 'prompts'}: names nothing to evaluate")
        arms = (OFF, *self.drafters)
        for key, names, known in (
            ("servers", self.servers, arms),
            ("trained_on", self.trained_on, self.drafters),
            ("trained_on", {name for sets in self.trained_on.values() for name in sets}, self.prompts),
        ):
            if unknown := sorted(set(names) - set(known)):
                raise ValueError(f"{key}: {', '.join(unknown)} is none of {', '.join(known) or 'no drafters'}")
        if self.engine == "sglang" and self.sglang_python is None:
            if missing := [name for name in self.drafters if name not in self.servers]:
                raise ValueError(f"servers: none for {', '.join(missing)}, and no sglang_python that starts one")
            if not self.servers:
                raise ValueError("engine sglang needs servers that run, or sglang_python to start them")
            if ignored := {"sglang_arguments", "start_timeout"} & self.model_fields_set:
                raise ValueError(f"{' and '.join(sorted(ignored))} is for servers that sglang_python starts")
        if len(set(self.servers.values())) < len(self.servers):
            raise ValueError("servers: two arms have one server")
        if len(set(self.concurrency)) < len(self.concurrency) or not self.concurrency:
            raise ValueError("concurrency: name each level once, and at least one")
        return self


# ---- reading


def parse_arguments(program: str, description: str, kind: Any) -> Any:
    """`--config FILE [key=value ...]` from the command line, as a config of `kind`."""
    arguments = config_parser(program, description).parse_args()
    return load_config(arguments.config, arguments.overrides, kind)


def config_parser(program: str, description: str) -> ArgumentParser:
    """A parser of `--config FILE [key=value ...]`, as `config` and `overrides`, to which a command may add."""
    parser = ArgumentParser(
        prog=f"python -m {program}", description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", required=True, metavar="FILE", help="YAML file (keys: osprey_jax/config.py)")
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="key=value",
        help="replaces a key of the file; dots go down (optimizer.learning_rate=3e-4), the value is YAML",
    )
    return parser


def load_config(path: str | Path, overrides: list[str], kind: Any) -> Any:
    """The YAML file at `path` with `overrides` applied, as `kind` (a `Section`, or `TrainConfig`).

    Raises:
      UserError: file missing or not YAML, key unknown, value of the wrong type, keys that contradict each other.
    """
    try:
        values = yaml.load(Path(path).read_text(encoding="utf-8"), Loader=_StrictLoader)
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); --config names a YAML file") from error
    except (yaml.YAMLError, ValueError, TypeError) as error:  # the latter two from values such as a 13th month
        raise UserError(f"{path}: not valid YAML ({error})") from error
    if not isinstance(values, dict):
        raise UserError(f"{path}: expected keys and values")
    for override in overrides:
        _apply(values, override)
    try:
        return pydantic.TypeAdapter(kind).validate_python(values)
    except pydantic.ValidationError as error:
        raise UserError(f"{path}: {'; '.join(_explain(e) for e in error.errors())}") from error


class _StrictLoader(yaml.SafeLoader):
    """`safe_load` that refuses a key given twice, of which YAML would keep the last in silence."""

    def construct_mapping(self, node, deep=False):
        if not isinstance(node, yaml.MappingNode):
            raise yaml.constructor.ConstructorError(None, None, "expected keys and values", node.start_mark)
        merges = "tag:yaml.org,2002:merge"  # `<<: *anchor` may be overruled
        keys = [self.construct_object(key, deep=True) for key, _ in node.value if key.tag != merges]
        for key in keys:
            if keys.count(key) > 1:
                raise yaml.constructor.ConstructorError(None, None, f"key {key!r} is given twice", node.start_mark)
        return super().construct_mapping(node, deep)


def _apply(values: dict, override: str) -> None:
    key, separator, text = override.partition("=")
    if not separator or not key:
        raise UserError(f"{override!r} is not key=value")
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise UserError(f"{override!r}: the value is not valid YAML ({error})") from error
    *parents, last = key.split(".")
    for parent in parents:
        if values.get(parent) is None:
            values[parent] = {}
        values = values[parent]
        if not isinstance(values, dict):
            raise UserError(f"{override!r}: {parent} is a value, not a group of keys")
    values[last] = value


def _explain(error: dict) -> str:
    """One of pydantic's errors as `key: what`."""
    location = [str(part) for part in error["loc"] if part not in ("pretrain", "distill")]
    key = ".".join(location) or "config"
    if error["type"] == "extra_forbidden":
        return f"unknown key {key}"
    if error["type"] == "missing":
        return f"missing key {key}"
    if error["type"].startswith("union_tag"):
        return "stage must be pretrain or distill"
    message = error["msg"].removeprefix("Value error, ")
    shown = "" if isinstance(error["input"], dict) else f", not {error['input']!r}"
    return f"{key}: {message}{shown}" if location else message
