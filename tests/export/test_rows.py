"""Which tokens of which conversations an export is checked on."""

import numpy as np

from export.rows import Row, batch_of, choose_rows, points_of, read_tokens
from osprey_jax.data.encoding import Tokens


def tokens(*turns: tuple[int, int], length: int) -> Tokens:
    mask = np.zeros(length, bool)
    for start, end in turns:
        mask[start:end] = True
    return Tokens("file:1", "one", np.arange(length, dtype=np.int32), mask, length)


def test_points_are_where_a_chain_starts():
    """From the turn's first token known to its last but one: what a server with that prompt drafts."""
    (row,) = choose_rows([tokens((4, 9), (12, 15), length=30)], 5)
    assert row.turns == ((4, 9), (12, 15)) and row.points_P.tolist() == [3, 4, 5, 6, 11, 12]
    assert len(row.token_ids_S) == 20  # and the tokens that the last chain reads


def test_turns_too_short_to_draft_are_left_out():
    """A turn of one token is given by the prefill; a row of such turns alone shows nothing."""
    assert choose_rows([tokens((4, 5), length=9)], 5) == []
    (row,) = choose_rows([tokens((4, 5), (6, 8), length=9)], 5)
    assert row.turns == ((6, 8),)


def test_a_turn_without_a_prompt_starts_after_its_first_token():
    """At the first token there is no feature yet."""
    (row,) = choose_rows([tokens((0, 5), length=9)], 5)
    assert row.points_P.tolist() == [0, 1, 2]


def test_rows_are_few_and_cut():
    """A check is to take seconds, whatever the data."""
    long = tokens((10, 400), (420, 500), length=600)
    rows = choose_rows([long] * 50, 5)
    assert len(rows) == 8 and all(len(row.points_P) == 64 and len(row.token_ids_S) == 80 for row in rows)
    (row,) = choose_rows([tokens((10, 60), (80, 300), length=600)], 5)
    assert len(row.points_P) == 64 and row.turns[0] == (10, 60)


def test_late_rows_only_where_there_is_no_other():
    """A long prompt costs much; but long prompts alone must not stop an export."""
    early, late, later = (tokens((n, n + 9), length=n + 20) for n in (300, 700, 900))
    assert [row.turns[0][0] for row in choose_rows([later, early, late], 5)] == [300]
    assert [row.turns[0][0] for row in choose_rows([later, late], 5)] == [700]


def test_batch_and_points_of_several_rows():
    """Rows are padded on the right; a chain's token beyond its row is none."""
    rows = [Row(np.arange(8), ((2, 5),)), Row(np.arange(6), ((1, 6),))]
    batch = batch_of(rows)
    assert batch["segment_ids"].tolist() == [[1] * 8, [1] * 6 + [0] * 2]
    assert batch["positions"][1].tolist() == [0, 1, 2, 3, 4, 5, 0, 0]
    row_P, point_P = points_of(rows)
    assert row_P.tolist() == [0, 0, 1, 1, 1, 1] and point_P.tolist() == [1, 2, 0, 1, 2, 3]
    assert read_tokens(rows, 3).tolist() == [[True] * 6, [True] * 6, [True] * 5 + [False]]
