"""The exported config: keys that one SGLang or the other reads."""

import pytest

from export.to_sglang import sglang_config
from tests.checkpoints import read
from tests.conftest import GOLDEN

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


@pytest.mark.parametrize(
    "keys",
    [
        {"rope_parameters": LLAMA3 | {"rope_theta": 5e5}},
        {"rope_theta": 5e5, "rope_scaling": LLAMA3},
        {"rope_theta": 5e5, "rope_scaling": {k: v for k, v in LLAMA3.items() if k != "rope_type"} | {"type": "llama3"}},
    ],
    ids=["transformers 5", "transformers 4", "older"],
)
def test_rope_keys_of_both_generations(keys):
    """RoPE scaling survives whichever form the source wrote, and is written in both."""
    config = read(GOLDEN / "llama" / "expected" / "converted" / "config.json")
    del config["rope_parameters"]
    exported = sglang_config(config | keys)
    assert exported["rope_parameters"] == LLAMA3 | {"rope_theta": 5e5}
    assert exported["rope_theta"] == 5e5 and exported["rope_scaling"] == LLAMA3


def test_plain_rope_has_no_scaling():
    exported = sglang_config(read(GOLDEN / "qwen3" / "expected" / "converted" / "config.json"))
    assert exported["rope_theta"] == 1e6 and exported["rope_scaling"] is None
    assert sglang_config({"rope_theta": 1e4, "rope_scaling": None})["rope_parameters"] == {
        "rope_type": "default",
        "rope_theta": 1e4,
    }


def test_head_is_untied_whatever_the_source_said():
    """SGLang would tie the head to the embedding, and drop the trained one."""
    assert sglang_config({"rope_theta": 1e4, "tie_word_embeddings": True})["tie_word_embeddings"] is False
