"""What a person sees of the data: counts, the histogram, the mask."""

import dataclasses

import matplotlib.image
import numpy as np
import pytest
import tokenizers
import transformers

from osprey_jax.data.rows import LENGTH_EDGES, Report, Row
from osprey_jax.reports.data import describe, show, write_histogram

ESCAPE = "\x1b"


def report(lengths: list[int], length: int, **fields) -> Report:
    counts = np.histogram(lengths, [*LENGTH_EDGES, 2**60])[0].tolist()
    tokens = sum(min(n, length) for n in lengths)
    values = {
        "read": len(lengths),
        "used": len(lengths),
        "cut": sum(n > length for n in lengths),
        "dropped": {},
        "rows": -(-tokens // length),
        "length": length,
        "tokens": tokens,
        "supervised": tokens // 2,
        "lengths": counts,
    }
    return Report(**(values | fields))


# ---- counts


def test_describe():
    """Everything that was counted, numbers aligned, the commonest reason first."""
    made = report(
        [],
        4096,
        read=12_345,
        used=12_000,
        cut=67,
        dropped={"no assistant turn": 5, "malformed JSON": 5, "unknown role": 335},
        tokens=5_000_000,
        supervised=1_234_567,
        rows=1_300,
    )
    assert describe(made).split("\n") == [
        "12,345 records read, 12,000 used",
        "        335 dropped: unknown role",
        "          5 dropped: malformed JSON",
        "          5 dropped: no assistant turn",
        "         67 cut at 4,096 tokens",
        "  5,000,000 tokens, 1,234,567 of them supervised (24.7%)",
        "      1,300 rows of 4,096 tokens, 93.9% full",
    ]


def test_describe_what_is_clean():
    """Nothing dropped and nothing cut need no line."""
    assert describe(report([8], 16)).split("\n") == [
        "1 record read, 1 used",
        "  8 tokens, 4 of them supervised (50.0%)",
        "  1 row of 16 tokens, 50.0% full",
    ]


# ---- histogram


def columns(path, red: int, green: int, blue: int) -> np.ndarray:
    """The columns of the picture that hold a colour, outside the legend."""
    pixels = (matplotlib.image.imread(path)[..., :3] * 255).round().astype(int)
    found = (pixels == (red, green, blue)).all(-1)[pixels.shape[0] // 2 :]
    return np.flatnonzero(found.any(0))


@pytest.mark.parametrize(
    ("lengths", "left", "right"), [([100, 120, 200], True, False), ([100, 9000, 9100], True, True)]
)
def test_histogram(tmp_path, lengths, left, right):
    """Bars stand left and right of the row's length where there are such records."""
    path = tmp_path / "lengths.png"
    write_histogram(path, report(lengths, 1024))
    assert [file.name for file in tmp_path.iterdir()] == ["lengths.png"]
    bars, line = columns(path, 0x4C, 0x72, 0xB0), columns(path, 0xC4, 0x4E, 0x52)
    assert len(line) and (bars.min() < line.min(), bars.max() > line.max()) == (left, right)


def test_histogram_bars(tmp_path):
    """A bar stands at its length: one doubling is the same distance anywhere, and nothing lies between."""
    write_histogram(tmp_path / "a.png", report([64] * 10 + [256] * 10 + [1024] * 10, 256))
    bars = columns(tmp_path / "a.png", 0x4C, 0x72, 0xB0)
    starts = bars[np.diff(bars, prepend=-9) > 20]
    assert len(starts) == 3
    assert starts[2] - starts[1] == pytest.approx(starts[1] - starts[0], abs=3)


@pytest.mark.parametrize("lengths", [[], [1], [2**30]])
def test_histogram_of_little(tmp_path, lengths):
    """No record, or none of a usual length, still makes a picture."""
    write_histogram(tmp_path / "a.png", report(lengths, 16))
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_title(tmp_path, monkeypatch):
    """It says how many records there are and how many are cut."""
    titles = []
    monkeypatch.setattr("osprey_jax.reports.data.save", lambda figure, path: titles.append(figure.axes[0].get_title()))
    for made in (report([5] * 1500 + [20] * 500, 16), report([5], 16)):
        write_histogram(tmp_path / "a.png", made)
    assert titles == ["2,000 records, 500 cut (25.0%)", "1 record, none cut"]


# ---- records


@dataclasses.dataclass
class Prepared:
    """Rows as a prepared directory gives them."""

    made: list[Row]

    def __len__(self):
        return len(self.made)

    def __getitem__(self, index):
        return self.made[index].padded(64) | {"row": np.int32(index)}

    def records(self, index):
        return self.made[index].ids


@pytest.fixture(scope="module")
def tokenizer():
    """Byte-level, a token a byte: any character beyond ASCII is several."""
    byte_level = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    backend.pre_tokenizer, backend.decoder = byte_level, tokenizers.decoders.ByteLevel()
    alphabet = byte_level.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=258, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator([], trainer)
    return transformers.PreTrainedTokenizerFast(tokenizer_object=backend)


@pytest.fixture
def rows(tokenizer):
    """`rows([[(id, marked text), ...], ...])`: a row for each list, ⟦ and ⟧ around what is supervised."""

    def segment(text: str) -> tuple[list[int], list[bool]]:
        ids, mask = [], []
        for taught, part in enumerate(text.replace("⟧", "⟦").split("⟦")):
            tokens = tokenizer(part, add_special_tokens=False)["input_ids"]
            ids, mask = ids + tokens, mask + [taught % 2 == 1] * len(tokens)
        return ids, mask

    def rows(contents: list[list[tuple[str, str]]]) -> Prepared:
        made = []
        for row in contents:
            ids, masks = zip(*(segment(text) for _, text in row), strict=True)
            token_ids, mask = np.concatenate(ids).astype(np.int32), np.concatenate(masks)
            made.append(Row(token_ids, mask, [len(part) for part in ids], [name for name, _ in row]))
        return Prepared(made)

    return rows


def test_show(rows, tokenizer):
    """A record after another, over rows and their segments, as many as asked for, padding left out."""
    made = rows([[("a", "hi⟦yes</s>⟧\n"), ("b", "⟦x⟧")], [("c", "no")]])
    expected = [
        "a (row 0): 7 tokens, 4 supervised\nhi⟦yes</s>⟧\n",
        "b (row 0): 1 token, 1 supervised\n⟦x⟧",
        "c (row 1): 2 tokens, 0 supervised\nno",
    ]
    for count in (0, 1, 2, 3, 9):
        assert list(show(made, tokenizer, count)) == expected[:count]


def test_colour(rows, tokenizer):
    """Colour ends before each line does, and a supervised newline is seen."""
    on, off = f"{ESCAPE}[30;42m", f"{ESCAPE}[0m"
    (text,) = show(rows([[("a", "q⟦one\n\ntwo⟧\n⟦x\n⟧")]]), tokenizer, 1, colour=True)
    header, body = text.split("\n", 1)
    assert header == f"{ESCAPE}[1ma (row 0): 12 tokens, 10 supervised{off}"
    assert body == f"q{on}one↵{off}\n{on}↵{off}\n{on}two{off}\n{on}x↵{off}\n"


def test_characters_of_several_tokens(rows, tokenizer):
    """They come out whole within a part; one that the row's end or the mask cuts spoils nothing else."""
    made = rows([[("a", "é🙂⟦é🙂⟧é")]])
    assert next(show(made, tokenizer, 1)).endswith("\né🙂⟦é🙂⟧é")
    mask = made.made[0].loss_mask.copy()
    mask[6] = False  # the first byte of the supervised é
    cut = Prepared([made.made[0]._replace(loss_mask=mask)])
    assert next(show(cut, tokenizer, 1)).endswith("\né🙂\ufffd⟦\ufffd🙂⟧é")


def test_spaces_are_kept():
    """Also where the tokenizer drops a text's first space, or the one before punctuation."""
    words = {"▁a": 0, "▁b": 1, "▁.": 2}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="▁a"))
    backend.decoder = tokenizers.decoders.Metaspace()
    tidy = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, clean_up_tokenization_spaces=True)
    assert tidy.decode([0, 1, 2]) == "a b."
    row = Row(np.array([0, 1, 2, 1], np.int32), np.array([False, True, True, False]), [4], ["x"])
    assert next(show(Prepared([row]), tidy, 1)).endswith("\na⟦ b .⟧ b")


@pytest.mark.parametrize("colour", [False, True])
def test_nothing_drives_the_terminal(rows, tokenizer, colour):
    """Escape sequences, carriage returns, changes of direction and our own marks appear as what they are."""
    hostile = f"{ESCAPE}[2J\x9b1m\r\x07\x08\x7f\u202e\u2066\u2028\x00\x85"
    (text,) = show(rows([[(f"i{ESCAPE}\n\td", f"{hostile}⟦{hostile}\t\n⟧")]]), tokenizer, 1, colour=colour)
    for known in (f"{ESCAPE}[30;42m", f"{ESCAPE}[1m", f"{ESCAPE}[0m"):
        text = text.replace(known, "") if colour else text
    assert {c for c in text if not c.isprintable()} == {"\n", "\t"}
    shown = r"\x1b[2J\x9b1m\r\x07\x08\x7f\u202e\u2066\u2028\x00\x85"
    assert text.count(shown) == 2 and text.startswith(r"i\x1b\n\td (row 0)")


def test_marks_in_the_text(tokenizer):
    """A bracket of the text cannot be taken for one of ours."""
    ids = tokenizer("⟦a⟧", add_special_tokens=False)["input_ids"]
    row = Row(np.array(ids, np.int32), np.ones(len(ids), bool), [len(ids)], ["x"])
    assert next(show(Prepared([row]), tokenizer, 1)).endswith("\n⟦\\u27e6a\\u27e7⟧")
