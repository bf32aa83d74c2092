"""A small real tokenizer for tests of data."""

import pytest
import tokenizers
import transformers

SPECIAL = ["</s>", "<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|begin|>"]


@pytest.fixture(scope="session")
def make_tokenizer():
    """`make_tokenizer(chat_template, eos_token, special)`: byte-level BPE which trims offsets as Llama's does.

    `special` are more special tokens than those it always has.
    """

    def make(
        chat_template: str | None = None, eos_token: str | None = "</s>", special: tuple[str, ...] = ()
    ) -> transformers.PreTrainedTokenizerBase:
        byte_level = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend = tokenizers.Tokenizer(tokenizers.models.BPE())
        backend.pre_tokenizer = byte_level
        backend.decoder = tokenizers.decoders.ByteLevel()
        backend.post_processor = tokenizers.processors.ByteLevel(trim_offsets=True)
        trainer = tokenizers.trainers.BpeTrainer(
            vocab_size=320 + len(special),
            special_tokens=[*SPECIAL, *special],
            initial_alphabet=byte_level.alphabet(),
            show_progress=False,
        )
        backend.train_from_iterator(["yes yes yes\n\nno no no\n\nhello hello user assistant"] * 9, trainer)
        tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=eos_token)
        tokenizer.chat_template = chat_template
        return tokenizer

    return make
