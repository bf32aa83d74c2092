"""A checkpoint's tokenizer."""

import json
import shutil
from pathlib import Path
from typing import Any

import tokenizers
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
    """The tokenizer in a local directory; where there is a tokenizer.json, it decides how text becomes tokens.

    transformers may build the class that tokenizer_config.json (or config.json's model type) names from the vocabulary
    alone and with that class's own pre-tokenizer: DeepSeek's Qwen distillations then split text as Qwen does. The
    generic class takes tokenizer.json as it is.
    """
    directory = require_directory(directory, "a tokenizer")
    if not any((directory / name).is_file() for name in ("tokenizer.json", "vocab.json", "tokenizer.model")):
        # transformers would make an empty one of the model's config.
        raise UserError(f"{directory}: no tokenizer files; put tokenizer.json and tokenizer_config.json there too")
    options = {"local_files_only": True, "trust_remote_code": False}
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(directory, **options)
        if not (directory / "tokenizer.json").is_file():
            return tokenizer
        written = _pipeline(tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json")))
        if tokenizer.is_fast and _pipeline(tokenizer.backend_tokenizer) == written:
            return tokenizer
        tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(directory, **options)
        same = _pipeline(tokenizer.backend_tokenizer) == written
    except Exception as error:  # transformers and tokenizers raise many kinds for one cause
        raise UserError(f"{directory}: no usable tokenizer ({error})") from error
    if not same:
        raise UserError(f"{directory}: this transformers does not load tokenizer.json as it is written")
    return tokenizer


def _pipeline(tokenizer: tokenizers.Tokenizer) -> dict[str, Any]:
    """What makes tokens of text and text of tokens, without flags that change neither.

    Without added tokens, and without the post-processor, which adds the special tokens that nothing here asks for.
    """

    def essence(part: Any) -> Any:
        if isinstance(part, list):
            return [essence(item) for item in part]
        if isinstance(part, dict):
            return {key: essence(value) for key, value in part.items() if key != "trim_offsets"}
        return part

    parts, _, model = tokenizer.to_str().partition(',"model":')  # the last and by far the longest: left as text
    parts = json.loads(parts + "}")
    if (parts["decoder"] or {}).get("type") == "ByteLevel":
        parts["decoder"] = "ByteLevel"  # a decoder ignores the flags that it shares with the pre-tokenizer
    return {name: essence(parts[name]) for name in ("normalizer", "pre_tokenizer", "decoder")} | {"model": model}


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
