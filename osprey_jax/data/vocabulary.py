"""Vocabulary alignment: which rows of a source's embedding make each row of a target's.

Axes: V target vocabulary, U source vocabulary, H width. Rows are ragged: a target token can need several source tokens.
"""

import dataclasses

import numpy as np
import transformers

SPACE_MARKERS = ("▁", "Ġ")  # how SentencePiece and byte-level BPE write a space
DOMINANT = 0.2  # a tokenizer uses a marker when more than this part of its entries starts with it


@dataclasses.dataclass(frozen=True)
class Alignment:
    """Source ids of every target row, one row after another, and how the target's tokens found them."""

    source_ids: np.ndarray  # int32, the rows' ids joined
    count_V: np.ndarray  # int32, how many of them each row has; 0: the row stays zero
    direct: int  # the source has the same string
    single: int  # the token's text is one source token
    averaged: int  # its text is several
    unmapped: int  # its text is none

    def report(self) -> dict[str, int]:
        """What `tokenizer_alignment.json` holds. Rows without a token count only in `vocab_size`."""
        counts = {name: getattr(self, name) for name in ("direct", "single", "averaged", "unmapped")}
        return counts | {"vocab_size": len(self.count_V)}

    def apply(self, table_UxH: np.ndarray) -> np.ndarray:
        """The target's table (V, H): copies of the source's rows and means (taken in float32), in its dtype."""
        table_VxH = np.zeros((len(self.count_V), table_UxH.shape[1]), np.float32)
        start_V = np.cumsum(self.count_V) - self.count_V
        for nth in range(self.count_V.max(initial=0)):
            rows = np.flatnonzero(self.count_V > nth)
            part = table_UxH[self.source_ids[start_V[rows] + nth]]
            table_VxH[rows] = part if nth == 0 else table_VxH[rows] + part
        several = np.flatnonzero(self.count_V > 1)
        table_VxH[several] /= self.count_V[several, None].astype(np.float32)
        return table_VxH.astype(table_UxH.dtype, copy=False)


def align(
    source: transformers.PreTrainedTokenizerBase, target: transformers.PreTrainedTokenizerBase, vocab_size: int
) -> Alignment:
    """Align the `vocab_size` rows of a target with a source: by string, else by tokenizing the token's text.

    Ids of the target must be below `vocab_size`; rows that no token has, in gaps or as padding, stay zero.
    """
    source_vocab, target_vocab = source.get_vocab(), target.get_vocab()
    old, new = _space_marker(target_vocab), _space_marker(source_vocab)
    swaps = old is not None and new is not None and old != new

    token_of = {target_id: token for token, target_id in target_vocab.items()}
    found, rest = {}, []
    for target_id, token in token_of.items():
        source_id = source_vocab.get(token.replace(old, new) if swaps else token)
        if source_id is None:
            rest.append(target_id)
        else:
            found[target_id] = [source_id]
    direct = len(found)

    texts = [_text(target, token_of[target_id]) for target_id in rest]
    encoded = source(texts, add_special_tokens=False)["input_ids"] if texts else []  # one batch: ten times faster
    found |= zip(rest, encoded, strict=True)

    rows = [found.get(target_id, []) for target_id in range(vocab_size)]
    lengths = np.array([len(ids) for ids in encoded], np.int64)
    return Alignment(
        source_ids=np.array([source_id for ids in rows for source_id in ids], np.int32),
        count_V=np.array([len(ids) for ids in rows], np.int32),
        direct=direct,
        single=int((lengths == 1).sum()),
        averaged=int((lengths > 1).sum()),
        unmapped=int((lengths == 0).sum()),
    )


def _space_marker(vocab: dict[str, int]) -> str | None:
    """The space marker that a vocabulary uses, if one is dominant."""
    count = {marker: sum(token.startswith(marker) for token in vocab) for marker in SPACE_MARKERS}
    marker = max(SPACE_MARKERS, key=count.__getitem__)
    return marker if count[marker] > DOMINANT * len(vocab) else None


def _text(tokenizer: transformers.PreTrainedTokenizerBase, token: str) -> str:
    return " " if token in ("", "<0x20>") else tokenizer.convert_tokens_to_string([token])
