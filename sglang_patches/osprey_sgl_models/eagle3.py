"""The classes that SGLang finds under the names in a drafter's `architectures`."""

import copy
import logging
from collections.abc import Iterable

import torch
from sglang.srt.layers.logits_processor import LogitsProcessor
from sglang.srt.layers.vocab_parallel_embedding import ParallelLMHead
from sglang.srt.models import llama_eagle3
from sglang.srt.utils import add_prefix
from torch import nn

from .checkpoint import check_config, check_layout, load_checkpoint
from .two_streams import TwoStreamModel
from .versions import get_pp_group

logger = logging.getLogger(__name__)


class TwoStreamForCausalLM(llama_eagle3.LlamaForCausalLMEagle3):
    """SGLang's class with another model inside and another way of loading."""

    qk_norm: bool  # of the subclass

    def __init__(self, config, quant_config=None, prefix=""):
        nn.Module.__init__(self)  # SGLang's own would build its own layers
        check_config(config)
        self.config = config
        self.quant_config = quant_config
        self.pp_group = get_pp_group()
        self.model = TwoStreamModel(config, quant_config, add_prefix("model", prefix), qk_norm=self.qk_norm)
        self._draft_window_size = self.model.window
        self.lm_head = ParallelLMHead(
            config.draft_vocab_size,
            config.hidden_size,
            quant_config=quant_config,
            prefix=add_prefix("lm_head", prefix),
        )
        head_config = copy.deepcopy(config)
        head_config.vocab_size = config.draft_vocab_size
        self.logits_processor = LogitsProcessor(head_config)
        self.capture_aux_hidden_states = True
        self.load_lm_head_from_target = False
        self.hot_token_id = None  # target ids of a trimmed draft vocabulary
        # EAGLE-3 trains with the target's embedding and is served with it; a swapped stream starts as one of its own.
        self.owns_embedding = self.model.swap or config.target_hidden_size != config.hidden_size

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Every tensor of the checkpoint, or a `ValueError` naming the one that is missing, unexpected or odd."""
        optional = set() if self.owns_embedding else {"embed_tokens.weight"}
        self.hot_token_id = load_checkpoint(self, weights, optional)

    def set_embed(self, embed: torch.Tensor) -> None:
        """The worker offers the target's table to every EAGLE-3 draft.

        A table of our own that equals it is right only where the backbone is the target's own and was not trained:
        not refused, and said.
        """
        if not self.owns_embedding:
            super().set_embed(embed)
        elif torch.equal(self.model.embed_tokens.weight, embed):
            logger.warning(
                f"draft model {self.config._name_or_path}: its embedding is the target's, bit for bit; a drafter that "
                "was trained has one of its own: unless it was cut from this target, export it again"
            )


class Qwen3ForCausalLMEagle3(TwoStreamForCausalLM):
    """A drafter made of Qwen3: RMSNorm on each head of q and k."""

    qk_norm = True


class LlamaForCausalLMEagle3(TwoStreamForCausalLM):
    """A drafter made of Llama. One layer with its streams not swapped is EAGLE-3 as SGLang has it: that stays there."""

    qk_norm = False

    def __new__(cls, config, quant_config=None, prefix=""):
        check_layout(config)
        biases = getattr(config, "attention_bias", False) or getattr(config, "mlp_bias", False)  # SGLang's has none
        if config.num_hidden_layers == 1 and not getattr(config, "swap_h_and_emb", False) and not biases:
            return llama_eagle3.LlamaForCausalLMEagle3(config, quant_config, prefix)
        return super().__new__(cls)


EntryClass = [Qwen3ForCausalLMEagle3, LlamaForCausalLMEagle3]
