"""A checkpoint's tokenizer."""

from pathlib import Path

import transformers

from osprey_jax.command import UserError
from osprey_jax.files import require_directory

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
    "generation_config.json",
)


def load_tokenizer(directory: str | Path, *, trust_remote_code: bool = False) -> transformers.PreTrainedTokenizerBase:
    """The tokenizer in a local directory."""
    directory = require_directory(directory, "a tokenizer")
    try:
        return transformers.AutoTokenizer.from_pretrained(
            directory, local_files_only=True, trust_remote_code=trust_remote_code
        )
    except Exception as error:  # transformers and tokenizers raise many kinds for one cause
        raise UserError(f"{directory}: no usable tokenizer ({error})") from error


def check_tokenizer(tokenizer: transformers.PreTrainedTokenizerBase, vocab_size: int, where: str) -> None:
    """`UserError` where a tokenizer can produce ids that a model of `vocab_size` rows does not have."""
    if len(tokenizer) > vocab_size:
        raise UserError(f"{where}: the tokenizer has {len(tokenizer)} entries, the model only {vocab_size} rows")
