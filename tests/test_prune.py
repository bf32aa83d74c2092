"""Stage 1: what a pruned checkpoint holds, and what is refused."""

import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file

from osprey_jax import prune as command
from osprey_jax.command import UserError
from osprey_jax.data.tokenizer import load_tokenizer
from osprey_jax.prune import prune
from tests.checkpoints import assert_same_tensors, read, write, write_backbone, write_weights


def test_golden(golden, tmp_path):
    """Two layers of the golden source are the released result to the bit, config included."""
    prune(golden / "source", 2, tmp_path / "out")
    expected = golden / "expected" / "pruned"
    assert_same_tensors(load_file(tmp_path / "out" / "model.safetensors"), load_file(expected / "model.safetensors"))
    assert read(tmp_path / "out" / "config.json") == read(expected / "config.json")


def test_tokenizer_goes_along(golden, tmp_path):
    """The result is a whole checkpoint: conversion reads the tokenizer out of it."""
    prune(golden / "source", 1, tmp_path / "out")
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        assert (tmp_path / "out" / name).read_bytes() == (golden / "source" / name).read_bytes()
    assert load_tokenizer(tmp_path / "out").get_vocab() == load_tokenizer(golden / "source").get_vocab()


def test_bfloat16_shards_keep_their_bits(golden, tmp_path):
    """A sharded bfloat16 source stays bfloat16: pruning rounds nothing and reads every shard."""
    tensors = write_backbone(golden / "source", tmp_path / "source", dtype=ml_dtypes.bfloat16, shards=3)
    prune(tmp_path / "source", 3, tmp_path / "out")
    dropped = ("model.layers.3.", "model.layers.4.")
    kept = {name: value for name, value in tensors.items() if not name.startswith(dropped)}
    assert_same_tensors(load_file(tmp_path / "out" / "model.safetensors"), kept)


def test_untied_head_stays(golden, tmp_path):
    """An untied model keeps its own head."""
    tensors = write_backbone(golden / "source", tmp_path / "source", tie_word_embeddings=False)
    prune(tmp_path / "source", 1, tmp_path / "out")
    head = load_file(tmp_path / "out" / "model.safetensors")["lm_head.weight"]
    np.testing.assert_array_equal(head, tensors["lm_head.weight"])


def test_tied_stays_tied(golden, tmp_path):
    """Some writers store a tied head a second time; the result holds the table once."""
    tensors = write_backbone(golden / "source", tmp_path / "source")
    write_weights(tmp_path / "source", tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"]})
    prune(tmp_path / "source", 1, tmp_path / "out")
    assert "lm_head.weight" not in load_file(tmp_path / "out" / "model.safetensors")
    assert read(tmp_path / "out" / "config.json")["tie_word_embeddings"] is True


@pytest.mark.parametrize("layers", [-1, 0, 6])
def test_impossible_depth(golden, tmp_path, layers):
    """The golden source has 5 blocks: 1 to 5 can be kept."""
    with pytest.raises(UserError, match=f"5 layers, {layers} of them"):
        prune(golden / "source", layers, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_every_tensor_is_checked(golden, tmp_path):
    """A wrong tensor is named even where it lies in a block that goes: the checkpoint is not what its config says."""
    last = "model.layers.4.mlp.up_proj.weight"
    tensors = write_backbone(golden / "source", tmp_path / "source")
    cases = {
        f"missing {last}": {name: value for name, value in tensors.items() if name != last},
        "unexpected model.surprise": tensors | {"model.surprise": np.zeros(1, np.float32)},
        rf"{last} has shape \(80, 31\)": tensors | {last: tensors[last][:, 1:].copy()},
        f"{last} is I32": tensors | {last: tensors[last].astype(np.int32)},
    }
    for message, wrong in cases.items():
        write_weights(tmp_path / "source", wrong)
        with pytest.raises(UserError, match=message):
            prune(tmp_path / "source", 1, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_unsupported_model(golden, tmp_path):
    """A model that the drafter cannot be made of is refused at the first stage, by name."""
    write_backbone(golden / "source", tmp_path / "source")
    write(tmp_path / "source" / "config.json", read(golden / "source" / "config.json") | {"model_type": "gemma3"})
    with pytest.raises(UserError, match="'gemma3' is not supported"):
        prune(tmp_path / "source", 1, tmp_path / "out")


def test_existing_output_is_untouched(golden, tmp_path):
    """An output never overwrites another."""
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("precious")
    with pytest.raises(UserError, match="already exists"):
        prune(golden / "source", 1, tmp_path / "out")
    assert [(path.name, path.read_text()) for path in (tmp_path / "out").iterdir()] == [("mine", "precious")]


def test_interrupted_leaves_nothing(golden, tmp_path, monkeypatch):
    """An interrupt between the weights and the tokenizer leaves neither an output nor a temporary directory."""

    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "copy_tokenizer", interrupt)
    with pytest.raises(KeyboardInterrupt):
        prune(golden / "source", 1, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_command(golden, tmp_path, monkeypatch, capsys):
    """The command does what the function does."""
    argv = ["prune", "--source", str(golden / "source"), "--layers", "2", "--out", str(tmp_path / "out")]
    monkeypatch.setattr(sys, "argv", argv)
    command.main()
    assert read(tmp_path / "out" / "config.json") == read(golden / "expected" / "pruned" / "config.json")
    assert "first 2 layers" in capsys.readouterr().out


def test_command_error_is_one_line(tmp_path):
    """Bad input: exit status 2 and one line that says what and where, no traceback."""
    argv = ["--source", str(tmp_path / "nowhere"), "--layers", "2", "--out", str(tmp_path / "out")]
    done = subprocess.run([sys.executable, "-m", "osprey_jax.prune", *argv], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 1 and "nowhere: no such directory" in done.stderr
