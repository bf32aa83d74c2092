"""Drafters as this project's commands make them, of a tiny target that writes what they are taught on.

A converted one starts from a backbone that resembles the target, spoilt by noise, so that a hundred steps make it good.
Norms are far from 1 and from each other, before and after.
"""

import dataclasses
import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from flax import nnx

from export.to_sglang import to_sglang
from osprey_jax.config import DistillConfig, RegenerateConfig
from osprey_jax.convert import convert
from osprey_jax.data.tokenizer import load_tokenizer
from osprey_jax.decoding.requests import Request
from osprey_jax.decoding.target import Target, open_target
from osprey_jax.models import hf, hf_config
from osprey_jax.models.causal_lm import CausalLM
from osprey_jax.models.drafter import Drafter
from osprey_jax.prune import prune
from osprey_jax.regenerate import regenerate
from osprey_jax.training import stages
from osprey_jax.training.loop import train
from osprey_jax.training.mesh import make_mesh
from tests.conftest import GOLDEN
from tests.sglang.models import shallow_target, tokenizer_rows, write_drafter, write_target

TAUGHT, UNKNOWN = 16, 2  # conversations
ASKED = 6  # of those taught on: a small drafter knows them by heart, and its chains are long
NOISE = 0.3  # of each weight's spread: a converted drafter is accepted 1.5 tokens at a time then
DEEP = 0.05  # what the target's later blocks add, so that a tap is not the next one; its first two add 0.1
BLOCKS = 3  # of a backbone, before it is cut to two


@dataclasses.dataclass(frozen=True)
class Family:
    """A target, conversations that it wrote, and prompts: some of those, and some that nothing was taught on."""

    model: CausalLM
    target: Path
    conversations: Path
    prompts: Path

    @property
    def chat(self) -> Target:
        return open_target(self.target, {})

    def requests(self, limit: int) -> list[Request]:
        """The prompts as a server would be asked."""
        records = [json.loads(line) for line in self.prompts.read_text().splitlines()]
        return [Request(self.chat.prompt_ids(record["conversations"]), limit) for record in records]


def make_family(folder: Path, **changes) -> Family:
    """With a target whose numbers are `changes`. It writes whole words, so that its text is its tokens again."""
    tokenizer = load_tokenizer(GOLDEN / "qwen3" / "target")
    # Sorted: the vocabulary comes in another order in each process.
    words = sorted(i for token, i in tokenizer.get_vocab().items() if token[0] == "Ġ" and token[1:].isalpha())
    model = shallow_target(deep=DEEP, vocab_size=tokenizer_rows(), **changes)
    head_VxH = np.asarray(model.lm_head.weight[...])
    written_V = np.isin(np.arange(len(head_VxH)), [*words, tokenizer.eos_token_id])
    model.lm_head.weight[...] = jnp.asarray(head_VxH * written_V[:, None])
    write_target(folder / "target", model, tokenizer.eos_token_id)

    rng = np.random.default_rng(0)
    texts = [tokenizer.decode(rng.choice(words, rng.integers(2, 40))) for _ in range(TAUGHT + UNKNOWN)]
    records = [{"id": f"r{i}", "conversations": [{"role": "user", "content": t}]} for i, t in enumerate(texts)]
    for path, part in (("taught.jsonl", records[:TAUGHT]), ("prompts.jsonl", records[:ASKED] + records[TAUGHT:])):
        (folder / path).write_text("".join(json.dumps(record) + "\n" for record in part))
    family = Family(model, folder / "target", folder / "conversations.jsonl", folder / "prompts.jsonl")
    config = {"target": family.target, "input": [str(folder / "taught.jsonl")], "output": family.conversations}
    regenerate(RegenerateConfig(**config, max_new_tokens=64, batch_size=TAUGHT))
    return family


def converted(family: Family, folder: Path, *, width: int, taps=None, mlp_bias: bool = False) -> Path:
    """A drafter made of a backbone `width` wide, pruned and converted."""
    backbone = backbone_like(family.model, width, mlp_bias)
    write_target(folder / "backbone", backbone, 0)
    prune(folder / "backbone", 2, folder / "pruned")
    convert(folder / "pruned", family.target, folder / "drafter", tap_layers=taps)
    return folder / "drafter"


def backbone_like(target: CausalLM, width: int, mlp_bias: bool) -> CausalLM:
    """The target's first blocks in `width` dimensions, the new ones zero; then perturbed."""
    config = dataclasses.replace(target.config, num_layers=BLOCKS, hidden_size=width, mlp_bias=mlp_bias)
    made = hf.abstract_causal_lm(config)
    state, sources = nnx.state(made), dict(nnx.to_flat_state(nnx.state(target)))
    rng = np.random.default_rng(5)
    for path, parameter in nnx.to_flat_state(state):
        value, spread = np.zeros(parameter.shape, np.float32), 0.3  # of a bias that the target has not
        if path in sources:
            source = np.asarray(sources[path][...])
            source, spread = source[:BLOCKS] if path[0] == "layers" else source, source.std()
            value[tuple(slice(n) for n in source.shape)] = source
            if value.shape[-1:] == (width,) and "norm" in path[-2]:  # whose mean is over more dimensions now
                value *= (source.shape[-1] / width) ** 0.5
        noise = NOISE * spread * rng.standard_normal(value.shape, np.float32)
        parameter.set_value(jnp.asarray(value + noise))
    nnx.update(made, state)
    return made


def from_scratch(family: Family, folder: Path, *, num_layers: int, taps: tuple[int, int, int]) -> Path:
    """EAGLE-3's random start; but its norms, which would all be 1, are random too."""
    config = hf_config.scratch_drafter_config(family.model.config, num_layers, None)
    drafter = Drafter(dataclasses.replace(config, tap_layers=taps), rngs=nnx.Rngs(6))
    rng = np.random.default_rng(7)
    for path, parameter in nnx.to_flat_state(nnx.state(drafter, nnx.Param)):
        if "norm" in path[-2]:
            parameter[...] = jnp.asarray(rng.uniform(0.3, 3.0, parameter.shape), jnp.float32)
    write_drafter(folder / "drafter", drafter)
    return folder / "drafter"


def trained(family: Family, start: Path, *, steps: int, draft_vocab_size: int | None = None) -> Path:
    """The export of the drafter that `start` becomes."""
    folder = start.parent
    config = DistillConfig(
        stage="distill",
        run_dir=folder / "run",
        target=family.target,
        drafter={"checkpoint": start, "draft_vocab_size": draft_vocab_size},
        data={"train": [str(family.conversations)], "length": 128, "cache_dir": folder / "prepared", "processes": 1},
        optimizer={"learning_rate": 3e-3},
        ttt={"supervision": "exact", "normalization": "token"},
        batch_size=4,
        steps=steps,
        log_every=50,
        mesh={"data": 1},
    )
    mesh = make_mesh(config.mesh, rows=config.batch_size)
    train(config, stages.set_up(config, mesh), mesh)
    to_sglang(config.run_dir, folder / "export")
    return folder / "export"
