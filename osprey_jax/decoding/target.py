"""A target as it is served: model, tokenizer, chat template, where a turn ends and how long it may get."""

import dataclasses
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from osprey_jax.data.rendering import ChatTemplate
from osprey_jax.data.tokenizer import check_tokenizer, load_tokenizer
from osprey_jax.decoding.chat import Chat
from osprey_jax.decoding.requests import stop_token_ids
from osprey_jax.models.causal_lm import CausalLM
from osprey_jax.models.hf import load_causal_lm
from osprey_jax.models.hf_config import transformer_config
from osprey_jax.models.transformer import TransformerConfig


@dataclasses.dataclass(frozen=True)
class Target(Chat):
    """Everything but the weights, which are read last (`load`): what is wrong with the rest shows at once."""

    directory: Path
    config: TransformerConfig
    stop_ids: tuple[int, ...]

    def load(self, dtype: jnp.dtype) -> CausalLM:
        return load_causal_lm(self.directory, dtype=dtype)

    def text(self, token_ids: list[int]) -> str:
        """What was generated, as text: without the terminator and other special tokens."""
        kept = token_ids[:-1] if token_ids and token_ids[-1] in self.stop_ids else token_ids
        return self.tokenizer.decode(kept, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def open_target(directory: Path, template_options: dict[str, Any]) -> Target:
    """Raises `UserError` where the checkpoint is unusable, except for its weights."""
    config, tokenizer = transformer_config(directory), load_tokenizer(directory)
    check_tokenizer(tokenizer, config.vocab_size, str(directory))
    template, stop_ids = ChatTemplate(tokenizer, template_options), stop_token_ids(directory, tokenizer)
    return Target(tokenizer, template, config.max_position_embeddings, directory, config, stop_ids)
