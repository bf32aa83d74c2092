"""A checkpoint's tokenizer."""

import shutil
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


def load_tokenizer(directory: str | Path) -> transformers.PreTrainedTokenizerBase:
    """The tokenizer in a local directory."""
    directory = require_directory(directory, "a tokenizer")
    if not any((directory / name).is_file() for name in ("tokenizer.json", "vocab.json", "tokenizer.model")):
        # transformers would make an empty one of the model's config.
        raise UserError(f"{directory}: no tokenizer files; put tokenizer.json and tokenizer_config.json there too")
    try:
        return transformers.AutoTokenizer.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # transformers and tokenizers raise many kinds for one cause
        raise UserError(f"{directory}: no usable tokenizer ({error})") from error


def rows_needed(tokenizer: transformers.PreTrainedTokenizerBase) -> int:
    """Rows of an embedding that holds every id of the tokenizer: its entries, and more where ids have gaps."""
    return 1 + max(tokenizer.get_vocab().values(), default=-1)


def check_tokenizer(tokenizer: transformers.PreTrainedTokenizerBase, vocab_size: int, where: str) -> None:
    """`UserError` where a tokenizer can produce ids that a model of `vocab_size` rows does not have."""
    needed = rows_needed(tokenizer)
    if needed > vocab_size:
        raise UserError(f"{where}: the tokenizer needs {needed} rows, the model has only {vocab_size}")


def copy_tokenizer(source: Path, out: Path) -> None:
    """Copy the tokenizer's files, chat template and generation config, as far as `source` has them."""
    for name in TOKENIZER_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, out / name)
