"""Exports with a reference, as `export.to_sglang` leaves them; good drafters, norms far from uniform."""

import dataclasses
import functools
import shutil
from pathlib import Path

import ml_dtypes
import numpy as np
from safetensors.numpy import load_file, save_file

from export.comparison import Comparison
from export.exported import read_exported
from export.reference import Reference, digests, trained_facts, trainer_forward
from export.repairs import as_served, near
from export.rows import STEPS, Row, batch_of
from export.target_pass import run_target
from osprey_jax.decoding.generate import generate
from osprey_jax.decoding.requests import Request
from osprey_jax.files import fingerprint
from osprey_jax.models.causal_lm import CausalLM
from osprey_jax.models.drafter import Drafter
from osprey_jax.models.hf import load_drafter
from osprey_jax.models.hf_config import transformer_config
from osprey_jax.models.transformer import Llama3Scaling
from tests.checkpoints import read, write
from tests.decoding.conftest import prompts
from tests.sglang.models import (
    TAPS,
    VOCAB,
    shallow_target,
    trained_drafter,
    widened_drafter,
    write_drafter,
    write_target,
)

PROMPTS = prompts((5, 12, 20, 33), VOCAB)
ANSWER = 40  # tokens


def qwen3_equal():
    """The target's width, at which a server is tempted to put the target's embedding in place of the drafter's."""
    target = shallow_target()
    return target, widened_drafter(target, 32, noise=0.03)


def qwen3_wider():
    target = shallow_target()
    return target, widened_drafter(target, 96, noise=0.03)


def qwen3_trimmed():
    target = shallow_target()
    return target, widened_drafter(target, 32, noise=0.03, draft_ids=[i for i in range(VOCAB) if i % 9])


def llama_scaled_with_biases():
    scaling = Llama3Scaling(8.0, 1.0, 4.0, original_max_position_embeddings=64)
    target = shallow_target(qk_norm=False, attention_bias=True, rope_scaling=scaling)
    return target, widened_drafter(target, 40, noise=0.03, mlp_bias=True)


def eagle3_of_one_layer():
    target = shallow_target()
    return target, trained_drafter(target, PROMPTS[:2], num_layers=1, steps=30)


def eagle3_of_two_layers():
    target = shallow_target()
    return target, trained_drafter(target, PROMPTS[:2], num_layers=2, steps=30)


def qwen3_of_the_target():
    """The target's own first blocks, its embedding too: the one table that may be the target's."""
    target = shallow_target()
    return target, widened_drafter(target, 32, noise=0)


CASES = [
    qwen3_equal,
    qwen3_wider,
    qwen3_trimmed,
    llama_scaled_with_biases,
    eagle3_of_one_layer,
    eagle3_of_two_layers,
    qwen3_of_the_target,
]


@dataclasses.dataclass(frozen=True)
class Good:
    """A sound export, in `directory`, and what it was made of."""

    target: CausalLM
    drafter: Drafter
    target_dir: Path
    directory: Path
    rows: list[Row]

    @functools.cached_property
    def comparison(self) -> Comparison:
        """From the files of `directory`."""
        reference = Reference.load(self.directory)
        layers = set().union(*near(TAPS, self.target.config.num_layers))
        passed = run_target(self.target_dir, batch_of(reference.rows), layers)
        return Comparison(read_exported(self.directory), self.target_dir, reference.rows, passed, reference.seen)

    @functools.cached_property
    def serving(self):
        return as_served(self.comparison.exported, transformer_config(self.target_dir))

    def copy(self, out: Path) -> Path:
        shutil.copytree(self.directory, out)
        return out


def make(folder: Path, case) -> Good:
    """The export of `case`, its rows the target's own greedy answers."""
    target, drafter = case()
    write_target(folder / "target", target, 0)
    write_drafter(folder / "draft", drafter)
    drafter = load_drafter(folder / "draft")  # with the tap layers of its config
    answers = generate(target, [Request(prompt, ANSWER) for prompt in PROMPTS], stop_ids=(VOCAB,))
    rows = [
        Row(np.array(prompt + answer.token_ids, np.int32), ((len(prompt), len(prompt) + ANSWER),))
        for prompt, answer in zip(PROMPTS, answers, strict=True)
    ]
    taps = run_target(folder / "target", batch_of(rows), TAPS).taps(TAPS)
    seen = trainer_forward(drafter, rows, taps, STEPS)
    facts = trained_facts(drafter.config, fingerprint(folder / "target"))
    Reference(rows, seen, facts, digests(drafter)).save(folder / "draft")
    return Good(target, drafter, folder / "target", folder / "draft", rows)


# ---- faults to plant


def change_config(directory: Path, **changes) -> None:
    """None takes a key away."""
    config = read(directory / "config.json") | changes
    write(directory / "config.json", {key: value for key, value in config.items() if value is not None})


def change_tensors(directory: Path, change) -> None:
    """`change(tensors)` alters the dict in place."""
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file({name: np.ascontiguousarray(value) for name, value in tensors.items()}, directory / "model.safetensors")


def to_bfloat16(tensors: dict[str, np.ndarray]) -> None:
    for name, value in tensors.items():
        if value.dtype == np.float32:
            tensors[name] = value.astype(ml_dtypes.bfloat16)
