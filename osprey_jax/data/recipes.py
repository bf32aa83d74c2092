"""How blocks of data files become rows: one recipe for conversations, one for plain text.

A recipe is what rows depend on beside the data itself. It travels to the processes that work, where `open` makes the
function that turns a block into rows.
"""

import dataclasses
import hashlib
import importlib.metadata
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from osprey_jax.command import UserError
from osprey_jax.data.conversations import block_records, check_kind
from osprey_jax.data.encoding import ConversationEncoder, by_characters, exact_tokenizer
from osprey_jax.data.packing import best_fit
from osprey_jax.data.records import Block, Rejection, kind_of
from osprey_jax.data.rows import Row
from osprey_jax.data.text import block_documents
from osprey_jax.data.tokenizer import TOKENIZER_FILES, load_tokenizer, rows_needed


@dataclasses.dataclass(frozen=True)
class BlockRows:
    """The rows of blocks, and what became of their records."""

    rows: list[Row]
    rejections: list[Rejection]  # dropped
    cut: list[Rejection]  # used, but not to their end
    lengths: list[int]  # of the records used, in tokens, before a cut


Opened = tuple[Callable[[list[Block]], BlockRows], int]  # (blocks -> rows, the tokenizer's number of ids)


class Recipe(Protocol):
    tokenizer: Path  # a directory
    length: int  # tokens a row

    def facts(self) -> dict[str, Any]:
        """What the rows depend on, as JSON."""

    def check(self, path: Path) -> None:
        """Raises `UserError` where a data file is of a kind that cannot hold such records."""

    def open(self) -> Opened:
        """Raises `UserError` where the tokenizer cannot be used."""


@dataclasses.dataclass(frozen=True)
class ConversationRecipe:
    """Conversations through the chat template; the assistant's turns are supervised."""

    tokenizer: Path
    length: int
    template_options: dict[str, Any]
    only_last_turn: bool  # supervise no other
    packing: bool  # several a row, each a segment; else one a row, in the order of the records

    def facts(self) -> dict[str, Any]:
        return _facts(self)

    def check(self, path: Path) -> None:
        check_kind(path)

    def open(self) -> Opened:
        tokenizer = load_tokenizer(self.tokenizer)
        encoder = ConversationEncoder(tokenizer, self.length, self.template_options, self.only_last_turn)

        def rows(blocks: list[Block]) -> BlockRows:
            used, rejections, cut = [], [], []
            records = list(itertools.chain.from_iterable(map(block_records, blocks)))
            encoded = iter(encoder.encode([record for record in records if not isinstance(record, Rejection)]))
            for record in records:
                item = record if isinstance(record, Rejection) else next(encoded)
                if isinstance(item, Rejection):
                    rejections.append(item)
                    continue
                used.append(item)
                if item.whole > self.length:
                    cut.append(Rejection(item.where, item.id, f"cut at {self.length} of {item.whole} tokens"))
            lengths = [len(item.token_ids) for item in used]
            bins = best_fit(lengths, self.length) if self.packing else [[i] for i in range(len(used))]
            made = [
                Row(
                    np.concatenate([used[i].token_ids for i in row]),
                    np.concatenate([used[i].loss_mask for i in row]),
                    [lengths[i] for i in row],
                    [used[i].id for i in row],
                )
                for row in bins
            ]
            return BlockRows(made, rejections, cut, [item.whole for item in used])

        return rows, rows_needed(tokenizer)


@dataclasses.dataclass(frozen=True)
class TextRecipe:
    """Documents, each followed by EOS, one after another in full rows; every token is supervised.

    Of the rows made at one time only the last is not full. A document that does not fit goes on in the next row, as a
    segment of its own with positions from 0.
    """

    tokenizer: Path
    length: int

    def facts(self) -> dict[str, Any]:
        return _facts(self)

    def check(self, path: Path) -> None:
        kind_of(path)

    def open(self) -> Opened:
        tokenizer = load_tokenizer(self.tokenizer)
        eos = tokenizer.eos_token_id
        if eos is None:
            raise UserError(f"{self.tokenizer}: the tokenizer has no eos_token, which has to end every document")
        encoder = exact_tokenizer(tokenizer)

        def rows(blocks: list[Block]) -> BlockRows:
            documents, rejections = [], []
            for item in itertools.chain.from_iterable(map(block_documents, blocks)):
                (rejections if isinstance(item, Rejection) else documents).append(item)
            names, tokens, goes_on = [], [], False
            for batch in by_characters(documents, lambda document: len(document.text)):
                encoded = encoder.encode_batch([document.text for document in batch], add_special_tokens=False)
                for document, encoding in zip(batch, encoded, strict=True):
                    ids = np.array([*encoding.ids, eos] if document.ends else encoding.ids, np.int32)
                    if goes_on:  # the next piece of one document
                        tokens[-1] = np.concatenate([tokens[-1], ids])
                    else:
                        names.append(document.where)
                        tokens.append(ids)
                    goes_on = not document.ends
            made = list(_full_rows(names, tokens, self.length))
            return BlockRows(made, rejections, [], [len(ids) for ids in tokens])

        return rows, rows_needed(tokenizer)


def _facts(recipe: ConversationRecipe | TextRecipe) -> dict[str, Any]:
    """The recipe's options, its tokenizer by content, and the versions of what reads and applies it."""
    # The model's type in config.json decides on a class where tokenizer.json is missing.
    paths = [recipe.tokenizer / name for name in (*TOKENIZER_FILES, "config.json")]
    files = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in paths if path.is_file()}
    versions = {name: importlib.metadata.version(name) for name in ("jinja2", "tokenizers", "transformers")}
    options = dataclasses.asdict(recipe) | {"tokenizer": files}
    return {"recipe": type(recipe).__name__, "versions": versions} | options


def _full_rows(names: list[str], tokens: list[np.ndarray], length: int) -> Iterator[Row]:
    pieces, ids, room = [], [], length
    for name, rest in zip(names, tokens, strict=True):
        while len(rest):
            pieces.append(rest[:room])
            ids.append(name)
            room, rest = room - len(pieces[-1]), rest[room:]
            if not room:
                yield _taught(pieces, ids)
                pieces, ids, room = [], [], length
    if pieces:
        yield _taught(pieces, ids)


def _taught(pieces: list[np.ndarray], ids: list[str]) -> Row:
    token_ids = np.concatenate(pieces)
    return Row(token_ids, np.ones(len(token_ids), bool), [len(piece) for piece in pieces], ids)
