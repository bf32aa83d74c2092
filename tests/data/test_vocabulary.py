"""Vocabulary alignment: where each row of a target's embedding comes from."""

import json
import time

import ml_dtypes
import numpy as np
import pytest
import tokenizers
import transformers
from tokenizers import decoders, models, pre_tokenizers

from osprey_jax.data.tokenizer import load_tokenizer, rows_needed
from osprey_jax.data.vocabulary import align
from tests.real_tokenizers import real_tokenizer


def words(*vocab: str, gaps: dict[str, int] | None = None, decoder=None) -> transformers.PreTrainedTokenizerFast:
    """A tokenizer of whole words between blanks, which it drops, as it does words that it does not know."""
    ids = {token: i for i, token in enumerate(vocab)} | (gaps or {})
    tokenizer = tokenizers.Tokenizer(models.WordLevel(ids, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.decoder = decoder or decoders.Fuse()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def pieces(*vocab: str, merges=()) -> transformers.PreTrainedTokenizerFast:
    """A SentencePiece-like tokenizer: a space is ▁, unknown characters are dropped."""
    tokenizer = tokenizers.Tokenizer(models.BPE({token: i for i, token in enumerate(vocab)}, list(merges)))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=False)
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="never")
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def rows(alignment) -> list[list[int]]:
    """The source ids of each target row."""
    return [part.tolist() for part in np.split(alignment.source_ids, np.cumsum(alignment.count_V)[:-1])]


def test_golden_counts(golden):
    """The released counts; the 8 rows beyond the target's 448 entries count in the size alone."""
    alignment = align(load_tokenizer(golden / "source"), load_tokenizer(golden / "target"), 456)
    expected = golden / "expected" / "converted" / "tokenizer_alignment.json"
    assert alignment.report() == json.loads(expected.read_text())


def test_rows_are_what_the_source_makes_of_each_token(golden):
    """Row by row, one token at a time: the same string where the source has it, else its text, tokenized."""
    source, target = load_tokenizer(golden / "source"), load_tokenizer(golden / "target")
    got = rows(align(source, target, 456))
    for token, target_id in target.get_vocab().items():
        if token in source.get_vocab():
            assert got[target_id] == [source.get_vocab()[token]]
        else:
            text = target.convert_tokens_to_string([token])
            assert got[target_id] == source.encode(text, add_special_tokens=False)
    assert got[448:] == [[]] * 8


def test_every_way_to_find_a_row():
    """The same string, one token for the text, several, none."""
    source = pieces("a", "b", "▁", "c", "▁c", merges=[("▁", "c")])
    target = pieces("c", "ab", "ca", "xy", "▁c")
    alignment = align(source, target, 6)
    assert rows(alignment) == [[3], [0, 1], [3, 0], [], [4], []]
    assert alignment.report() == {"direct": 2, "single": 0, "averaged": 2, "unmapped": 1, "vocab_size": 6}
    # decoding drops the "#": the text of "#b" is "b", one token of the source
    stripped = align(source, words("#b", decoder=decoders.Replace("#", "")), 1)
    assert (rows(stripped), stripped.report()["single"]) == ([[1]], 1)


def test_source_special_tokens_are_not_added(golden):
    """A source that begins every text with a special token must not average it in."""
    source = load_tokenizer(golden / "source")
    plain = rows(align(source, load_tokenizer(golden / "target"), 456))
    source.backend_tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", 398)]
    )
    assert source("a")["input_ids"][0] == 398
    assert rows(align(source, load_tokenizer(golden / "target"), 456)) == plain


def test_space_markers_are_swapped():
    """Ġ of a byte-level target is ▁ of a SentencePiece source: the same string, wherever it stands."""
    source = pieces("▁the", "▁", "▁▁", "x")
    assert rows(align(source, words("Ġthe", "ĠĠ", "x"), 3)) == [[0], [2], [3]]


@pytest.mark.parametrize(("others", "swapped"), [("abc", True), ("abcd", False)])
@pytest.mark.parametrize("side", ["source", "target"])
def test_only_dominant_markers_are_swapped(side, others, swapped):
    """On a fifth of the entries or fewer, of either side, a marker is a character like others."""
    source = pieces("▁the", *(others if side == "source" else ""))
    target = words("Ġthe", *(others if side == "target" else ""))
    assert (rows(align(source, target, 5))[0] == [0]) == swapped


def test_the_commoner_marker_is_dominant():
    """Both markers on more than a fifth: the commoner of the two says what kind of tokenizer it is."""
    source, target = pieces("▁a", "▁b", "Ġc"), words("Ġa", "Ġb", "▁c")
    assert rows(align(source, target, 3)) == [[0], [1], []]


@pytest.mark.parametrize("token", ["<0x20>", ""])
def test_names_of_the_space(token):
    """The byte token of the space and the empty token stand for one space."""
    source = pieces("a", "▁", "▁a")
    assert rows(align(source, words("a", token), 2)) == [[0], [1]]


def test_ids_in_gaps():
    """Rows between a tokenizer's entries and its added tokens have no token: they stay zero, and size includes them."""
    target = words("a", gaps={"b": 4})
    assert rows_needed(target) == 5
    alignment = align(words("b", "a"), target, 6)
    assert rows(alignment) == [[1], [], [], [], [0], []]
    assert alignment.report() == {"direct": 2, "single": 0, "averaged": 0, "unmapped": 0, "vocab_size": 6}


def test_apply_copies_and_averages():
    """A row is copied to the bit (even -0.0), averaged in float32, or zero."""
    alignment = align(pieces("a", "b", "c"), pieces("b", "abc", "x"), 4)
    table_UxH = np.random.default_rng().normal(size=(3, 5)).astype(np.float32)
    table_UxH[1, 0] = -0.0
    got_VxH = alignment.apply(table_UxH)
    assert got_VxH[0].tobytes() == table_UxH[1].tobytes()
    np.testing.assert_array_equal(got_VxH[1], (table_UxH[0] + table_UxH[1] + table_UxH[2]) / np.float32(3))
    assert not got_VxH[2:].any()


def test_apply_rounds_once():
    """bfloat16 rows are summed in float32: 256 + 1 + 1 is 258, where bfloat16 would stay at 256."""
    alignment = align(pieces("a", "b", "c"), pieces("abc"), 1)
    table_UxH = np.array([[256.0], [1.0], [1.0]], ml_dtypes.bfloat16)
    got_VxH = alignment.apply(table_UxH)
    assert got_VxH.dtype == ml_dtypes.bfloat16
    assert got_VxH[0, 0] == ml_dtypes.bfloat16(258 / 3) != ml_dtypes.bfloat16(256 / 3)


@pytest.mark.network
@pytest.mark.parametrize(
    ("source", "target", "counts"),
    [
        ("qwen3", "qwen3", (151669, 0, 0, 0)),
        ("qwen3", "llama3_1", (109566, 297, 18393, 0)),
        ("llama3_1", "qwen3", (109566, 429, 41674, 0)),
    ],
)
def test_real_tokenizers(source, target, counts):
    """The released counts of real pairs (the last pair's are this project's own), loading included in under 15 s."""
    source, target = real_tokenizer(source), real_tokenizer(target)
    start = time.monotonic()
    source, target = load_tokenizer(source), load_tokenizer(target)
    report = align(source, target, rows_needed(target)).report()
    assert time.monotonic() - start < 15
    names = ("direct", "single", "averaged", "unmapped")
    assert report == dict(zip(names, counts, strict=True)) | {"vocab_size": len(target)}
