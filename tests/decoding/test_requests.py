import json
import types

import pytest

from osprey_jax.command import UserError
from osprey_jax.decoding.requests import (
    PREFILL_CHUNK,
    Request,
    by_length,
    limit_bucket,
    make_batch,
    prompt_bucket,
    stop_token_ids,
)


def test_groups_are_alike_in_length_and_complete():
    """Padding is what a batch wastes; ties keep the order of the input, so a rerun makes the same groups."""
    assert by_length([5, 1, 9, 1, 7], 2) == [[1, 3], [0, 4], [2]]


def test_few_shapes():
    """Every length fits its bucket, buckets are few, and a long one is whole chunks."""
    buckets = {prompt_bucket(n) for n in range(1, 4 * PREFILL_CHUNK + 1)}
    assert all(n <= prompt_bucket(n) for n in range(1, 4 * PREFILL_CHUNK + 1))
    assert len(buckets) <= 9
    assert all(b % PREFILL_CHUNK == 0 or PREFILL_CHUNK % b == 0 for b in buckets)
    assert (limit_bucket(1), limit_bucket(32), limit_bucket(33), limit_bucket(0)) == (32, 32, 64, 0)


def write(folder, name, value):
    (folder / name).write_text(json.dumps(value))


def test_stop_ids_of_all_sources(tmp_path):
    """A number or a list, in either file, and the tokenizer's own: all of them end a turn, as in SGLang."""
    tokenizer = types.SimpleNamespace(eos_token_id=9)
    write(tmp_path, "config.json", {"eos_token_id": 7})
    assert stop_token_ids(tmp_path, tokenizer) == (7, 9)
    write(tmp_path, "generation_config.json", {"eos_token_id": [3, 7]})
    assert stop_token_ids(tmp_path, tokenizer) == (3, 7, 9)
    assert stop_token_ids(tmp_path, types.SimpleNamespace(eos_token_id=None)) == (3, 7)


def test_no_stop_id_or_a_wrong_one_is_refused(tmp_path):
    """A target that never ends a turn would write to the limit every time."""
    tokenizer = types.SimpleNamespace(eos_token_id=None)
    write(tmp_path, "config.json", {"eos_token_id": None})
    with pytest.raises(UserError, match="end-of-turn"):
        stop_token_ids(tmp_path, tokenizer)
    write(tmp_path, "config.json", {"eos_token_id": "</s>"})
    with pytest.raises(UserError, match="not a token id"):
        stop_token_ids(tmp_path, tokenizer)


def test_prompts_that_cannot_be_read_are_refused():
    """An id past the embedding would be clamped to the last row in silence."""
    with pytest.raises(UserError, match="no token"):
        make_batch([Request([], 4)], (1,), 10, 1)
    with pytest.raises(UserError, match="wrong tokenizer"):
        make_batch([Request([3, 10], 4)], (1,), 10, 1)
