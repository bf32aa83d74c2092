"""Reading checkpoints: what is read, and what is refused by name."""

import dataclasses
import shutil

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from osprey_jax.command import UserError
from osprey_jax.models import hf, hf_config
from osprey_jax.models.transformer import Llama3Scaling
from tests.checkpoints import assert_same_tensors, read, write, write_backbone, write_weights
from tests.conftest import GOLDEN

QWEN3 = GOLDEN / "qwen3"


@pytest.fixture
def checkpoint(tmp_path):
    """A writable copy of a small language model's checkpoint."""
    shutil.copytree(QWEN3 / "source", tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture
def drafter(tmp_path):
    """A writable copy of a drafter's checkpoint."""
    shutil.copytree(QWEN3 / "expected" / "converted", tmp_path / "drafter")
    return tmp_path / "drafter"


def change_config(directory, **changes):
    write(directory / "config.json", read(directory / "config.json") | changes)


def change_tensors(directory, change):
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors")


def test_round_trip(golden):
    """What is written after loading has the names, dtypes and bits of what was read, models and drafters alike."""
    cases = {"target": hf.load_causal_lm, "source": hf.load_causal_lm, "expected/converted": hf.load_drafter}
    for path, load in cases.items():
        assert_same_tensors(hf.model_tensors(load(golden / path)), load_file(golden / path / "model.safetensors"))


def test_sharded_and_bfloat16(tmp_path):
    """Several files and an index, bfloat16 on disk: the values of one float32 file that holds the same numbers."""
    tensors = write_backbone(QWEN3 / "source", tmp_path / "bf16", dtype=ml_dtypes.bfloat16, shards=3)
    wide = {name: value.astype(np.float32) for name, value in tensors.items()}
    assert_same_tensors(hf.model_tensors(hf.load_causal_lm(tmp_path / "bf16")), wide)


def test_one_layer_drafter_is_called_midlayer(tmp_path):
    """EAGLE-3's name for the only layer, which SGLang's stock class reads."""
    config = hf_config.scratch_drafter_config(hf_config.transformer_config(QWEN3 / "target"), 1, 100)
    names = hf.tensor_shapes(hf.abstract_drafter(config))
    assert "midlayer.self_attn.q_proj.weight" in names and not any(name.startswith("layers.") for name in names)
    assert names["lm_head.weight"] == (100, 48)


def test_missing_tensor(checkpoint):
    change_tensors(checkpoint, lambda tensors: tensors.pop("model.layers.3.mlp.up_proj.weight"))
    with pytest.raises(UserError, match=r"missing model\.layers\.3\.mlp\.up_proj\.weight"):
        hf.load_causal_lm(checkpoint)


def test_unexpected_tensor(checkpoint):
    """A tensor that the config does not ask for would be dropped in silence."""
    change_tensors(checkpoint, lambda tensors: tensors.update({"model.layers.0.extra": np.zeros(3, np.float32)}))
    with pytest.raises(UserError, match=r"unexpected model\.layers\.0\.extra"):
        hf.load_causal_lm(checkpoint)


def test_misshaped_tensor(checkpoint):
    change_tensors(checkpoint, lambda tensors: tensors.update({"model.norm.weight": np.zeros(31, np.float32)}))
    with pytest.raises(UserError, match=r"model\.norm\.weight has shape \(31,\), the config asks for \(32,\)"):
        hf.load_causal_lm(checkpoint)


def test_integer_weights(checkpoint):
    """Quantised weights are not a float's bits."""
    change_tensors(checkpoint, lambda tensors: tensors.update({"model.norm.weight": np.zeros(32, np.int8)}))
    with pytest.raises(UserError, match=r"model\.norm\.weight is I8"):
        hf.load_causal_lm(checkpoint)


def test_tied_head_may_be_stored(checkpoint):
    """Some tied checkpoints store the head too; like transformers, we use the embedding."""
    change_tensors(checkpoint, lambda tensors: tensors.update({"lm_head.weight": np.zeros((400, 32), np.float32)}))
    model = hf.load_causal_lm(checkpoint)
    np.testing.assert_array_equal(model.head_VxD, model.embed_tokens.weight[...])


def test_truncated_file(checkpoint):
    path = checkpoint / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(UserError, match="not a readable safetensors file"):
        hf.load_causal_lm(checkpoint)


def test_missing_shard(checkpoint):
    tensors = load_file(checkpoint / "model.safetensors")
    (checkpoint / "model.safetensors").unlink()
    write_weights(checkpoint, tensors, shards=2)
    (checkpoint / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(UserError, match=r"model-00002-of-00002\.safetensors: no such file"):
        hf.load_causal_lm(checkpoint)


def test_index_that_leaves_the_checkpoint(checkpoint):
    """An index must not name files elsewhere."""
    write(checkpoint / "model.safetensors.index.json", {"weight_map": {"model.norm.weight": "../model.safetensors"}})
    with pytest.raises(UserError, match="outside the checkpoint"):
        hf.load_causal_lm(checkpoint)


def test_pickled_weights_are_refused(checkpoint):
    (checkpoint / "model.safetensors").rename(checkpoint / "pytorch_model.bin")
    with pytest.raises(UserError, match="never loaded; save it as safetensors"):
        hf.load_causal_lm(checkpoint)


# ---- configs


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "gpt2"}, "model_type 'gpt2' is not supported"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0}}, "RoPE type 'yarn'"),
        ({"use_sliding_window": True, "sliding_window": 64}, "sliding-window"),
        ({"num_attention_heads": 3}, "3 heads, 2 key/value heads"),
        ({"num_hidden_layers": 0, "layer_types": []}, "num_layers is 0"),
        ({"hidden_size": "wide"}, "hidden_size"),
    ],
)
def test_refused_configs(checkpoint, change, message):
    """What is not computed is refused by name, before any weight is read."""
    change_config(checkpoint, **change)
    with pytest.raises(UserError, match=message):
        hf_config.transformer_config(checkpoint)


def test_both_generations_of_rope_keys(checkpoint):
    """transformers 5 nests `rope_theta`; transformers 4 wrote it beside `rope_scaling`."""
    config = read(GOLDEN / "llama" / "target" / "config.json")
    nested = hf_config.transformer_config(GOLDEN / "llama" / "target")
    parameters = config.pop("rope_parameters")
    theta = parameters.pop("rope_theta")
    write(checkpoint / "config.json", config | {"rope_theta": theta, "rope_scaling": parameters})
    assert hf_config.transformer_config(checkpoint) == nested
    assert nested.rope_scaling == Llama3Scaling(8.0, 1.0, 4.0, 64) and nested.rope_theta == 500000.0


def test_not_json(checkpoint):
    (checkpoint / "config.json").write_text("{")
    with pytest.raises(UserError, match="not valid JSON"):
        hf_config.transformer_config(checkpoint)


def test_backbone_is_not_a_drafter(checkpoint):
    with pytest.raises(UserError, match=r"'Qwen3ForCausalLM' is not a drafter's .* osprey_jax\.convert"):
        hf_config.drafter_config(checkpoint)


def test_drafter_for_another_target(drafter):
    """By width, and by vocabulary."""
    config, target = hf_config.drafter_config(drafter), hf_config.transformer_config(QWEN3 / "target")
    hf_config.check_fits_target(config, target, "drafter")
    source = hf_config.transformer_config(QWEN3 / "source")
    with pytest.raises(UserError, match="target_hidden_size is 48, but the target's hidden size is 32"):
        hf_config.check_fits_target(config, source, "drafter")
    change_config(drafter, vocab_size=450)
    with pytest.raises(UserError, match="vocab_size is 450, but the target's is 456"):
        hf_config.check_fits_target(hf_config.drafter_config(write_vocab(drafter, 450)), target, "drafter")


def write_vocab(drafter, size):
    change_config(drafter, draft_vocab_size=size)
    return drafter


@pytest.mark.parametrize("taps", [(1, 1, 5), (5, 3, 1), (-1, 3, 5), (1, 3, 9), (1, 3)])
def test_bad_tap_layers(taps):
    """Equal, out of order, negative, too deep, too few."""
    with pytest.raises(UserError, match=r"are not three different blocks, ascending, within 0\.\.8"):
        hf_config.check_tap_layers(taps, 9)


def test_default_tap_layers():
    """The published default; below 7 layers it must be replaced."""
    assert hf_config.check_tap_layers(None, 36) == (1, 17, 32)
    assert hf_config.check_tap_layers(None, 7) == (1, 2, 3)
    with pytest.raises(UserError, match="the default tap layers"):
        hf_config.check_tap_layers(None, 6)


def test_trimmed_vocabulary(drafter):
    """`d2t` holds offsets, and must agree with `t2d`."""
    ids = np.array([0, 2, 3, 455])
    change_config(drafter, draft_vocab_size=4)
    head = load_file(drafter / "model.safetensors")["lm_head.weight"][ids]
    change_tensors(drafter, lambda t: t.update(hf.vocabulary_tensors(ids, 456) | {"lm_head.weight": head}))
    model = hf.load_drafter(drafter)
    np.testing.assert_array_equal(model.target_ids[...], ids)
    assert_same_tensors(hf.model_tensors(model), load_file(drafter / "model.safetensors"))
    change_tensors(drafter, lambda tensors: tensors.update({"d2t": ids}))
    with pytest.raises(UserError, match="d2t and t2d disagree"):
        hf.load_drafter(drafter)


@pytest.mark.parametrize("draft_vocab_size", [None, 100])
def test_config_from_numbers_is_read_back(golden, tmp_path, draft_vocab_size):
    """A drafter from scratch gets a config that says all of what it is, RoPE scaling included."""
    config = hf_config.scratch_drafter_config(hf_config.transformer_config(golden / "target"), 2, draft_vocab_size)
    write(tmp_path / "config.json", hf_config.drafter_hf_config(config, (1, 3, 5)))
    assert hf_config.drafter_config(tmp_path) == dataclasses.replace(config, tap_layers=(1, 3, 5))
