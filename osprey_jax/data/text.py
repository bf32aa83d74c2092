"""Plain text for pretraining: documents, each followed by EOS, packed to full rows."""

import itertools
from collections.abc import Iterator

import numpy as np
import tqdm
import transformers

from osprey_jax.command import UserError
from osprey_jax.data.records import find_files, read_json_lines
from osprey_jax.data.rows import Rows

_BATCH = 256  # documents tokenized at one time, on all cores


def read_documents(patterns: list[str]) -> Iterator[tuple[str, str]]:
    """`(where, text)` of each document that is not empty, from files or globs.

    `.txt` is one document (where: the file); `.jsonl` and `.jsonl.gz` hold one a line, in `text` (where: "file:line").

    Raises:
      UserError: a pattern matches nothing, a file is of another kind or not UTF-8, a line has no `text`.
    """
    for path in find_files(patterns):
        if path.name.endswith(".txt"):
            try:
                documents = [(str(path), path.read_text(encoding="utf-8-sig"))]
            except (OSError, ValueError) as error:
                raise UserError(f"{path}: cannot be read as UTF-8 text ({error})") from error
        elif path.name.endswith((".jsonl", ".jsonl.gz")):
            documents = ((where, _text(where, value)) for where, value in read_json_lines(path))
        else:
            raise UserError(f"{path}: text is read from .txt, .jsonl and .jsonl.gz files")
        yield from ((where, text) for where, text in documents if text)


def text_rows(patterns: list[str], tokenizer: transformers.PreTrainedTokenizerBase, length: int) -> Rows:
    """All documents as rows of `length` tokens, every one full but the last, every token taught.

    A document is its tokens and one EOS. Within a row it is a segment with positions from 0; one that does not fit
    goes on in the next row as that row's first segment. A row's id names its first document and, if another, its last.

    Raises:
      UserError: as `read_documents`; no document; a tokenizer without EOS.
    """
    eos = tokenizer.eos_token_id
    if eos is None:
        raise UserError(f"{tokenizer.name_or_path}: the tokenizer has no eos_token, which has to end every document")
    names: list[str] = []
    tokens: list[np.ndarray] = []
    documents = iter(tqdm.tqdm(read_documents(patterns), desc="tokenize", unit=" documents", disable=None))
    while batch := list(itertools.islice(documents, _BATCH)):
        names.extend(where for where, _ in batch)
        encoded = tokenizer([text for _, text in batch], add_special_tokens=False, verbose=False)["input_ids"]
        tokens.extend(np.array([*ids, eos], np.int32) for ids in encoded)
    if not tokens:
        raise UserError(f"{', '.join(patterns)}: no text in these files")
    return _pack(names, tokens, length)


def _pack(names: list[str], tokens: list[np.ndarray], length: int) -> Rows:
    """Documents one after another, cut to rows."""
    stream = np.concatenate(tokens)
    document = np.repeat(np.arange(len(tokens)), [len(ids) for ids in tokens])
    count = -(-len(stream) // length)
    padding = (0, count * length - len(stream))
    token_ids = np.pad(stream, padding).reshape(count, length)
    real = np.pad(np.ones(len(stream), np.int32), padding).reshape(count, length)
    document = np.pad(document, padding, mode="edge").reshape(count, length)

    column = np.arange(length)
    begins = np.diff(document, axis=1, prepend=-1) != 0  # the first token of a segment
    segments = np.cumsum(begins, axis=1)
    positions = column[None] - np.maximum.accumulate(np.where(begins, column, 0), axis=1)
    first, last = document[:, 0], document[:, -1]
    ids = [names[a] if a == b else f"{names[a]} .. {names[b]}" for a, b in zip(first, last, strict=True)]
    arrays = {"token_ids": token_ids, "loss_mask": real, "segment_ids": segments * real, "positions": positions * real}
    return Rows({name: array.astype(np.int32) for name, array in arrays.items()}, ids)


def _text(where: str, value: object) -> str:
    if isinstance(value, ValueError):
        raise UserError(f"{where}: not valid JSON ({value})")
    if not isinstance(value, dict) or not isinstance(value.get("text"), str):
        raise UserError(f'{where}: expected an object with "text"')
    return value["text"]
