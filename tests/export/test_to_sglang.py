"""The exported config: keys that one SGLang or the other reads."""

import pytest

from export.to_sglang import sglang_config
from osprey_jax.models.hf_config import drafter_config
from tests.checkpoints import read, write
from tests.conftest import GOLDEN

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


@pytest.fixture
def exported(tmp_path):
    """`exported(case, **changes)`: a golden drafter's config, changed (None takes a key away), as exported."""

    def export(case, **changes):
        raw = read(GOLDEN / case / "expected" / "converted" / "config.json") | changes
        raw = {key: value for key, value in raw.items() if value is not None}
        write(tmp_path / "config.json", raw)
        return sglang_config(raw, drafter_config(tmp_path))

    return export


@pytest.mark.parametrize(
    "keys",
    [
        {"rope_parameters": LLAMA3 | {"rope_theta": 5e5}},
        {"rope_parameters": None, "rope_theta": 5e5, "rope_scaling": LLAMA3},
    ],
    ids=["transformers 5", "transformers 4"],
)
def test_rope_keys_of_both_generations(exported, keys):
    """RoPE scaling survives whichever form the source wrote, and is written in both."""
    config = exported("llama", **keys)
    assert config["rope_parameters"] == LLAMA3 | {"rope_theta": 5e5}
    assert config["rope_theta"] == 5e5 and config["rope_scaling"] == LLAMA3


def test_plain_rope_has_no_scaling(exported):
    """Also where the source left theta to the architecture's default, as Llama 2 did."""
    config = exported("qwen3")
    assert config["rope_theta"] == 1e6 and config["rope_scaling"] is None
    config = exported("llama", rope_parameters=None)
    assert config["rope_parameters"] == {"rope_type": "default", "rope_theta": 1e4} and config["rope_theta"] == 1e4


def test_head_is_untied_whatever_the_source_said(exported):
    """SGLang would tie the head to the embedding, and drop the trained one."""
    assert exported("qwen3", tie_word_embeddings=True)["tie_word_embeddings"] is False
