"""Loading a checkpoint's tokenizer."""

import shutil

import pytest

from osprey_jax.command import UserError
from osprey_jax.data.tokenizer import load_tokenizer


def test_model_without_tokenizer(golden, tmp_path):
    """transformers makes an empty tokenizer of a config alone: everything after would train on nothing."""
    shutil.copyfile(golden / "target" / "config.json", tmp_path / "config.json")
    with pytest.raises(UserError, match="no tokenizer files"):
        load_tokenizer(tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(golden / "target" / name, tmp_path / name)
    assert len(load_tokenizer(tmp_path)) == 448
