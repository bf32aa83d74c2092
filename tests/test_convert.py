"""Stage 3: what a converted drafter holds, and what is refused. What it computes: tests of the unroll."""

import re
import shutil
import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file

from osprey_jax import convert as command
from osprey_jax.command import UserError
from osprey_jax.convert import convert
from osprey_jax.data.tokenizer import copy_tokenizer, load_tokenizer
from osprey_jax.data.vocabulary import align
from osprey_jax.models.causal_lm import CausalLM
from osprey_jax.models.hf import load_drafter, model_tensors
from osprey_jax.models.hf_config import transformer_config
from tests.checkpoints import assert_same_tensors, read, write, write_backbone, write_weights


@pytest.fixture
def target(golden, tmp_path):
    """A copy of the golden target's directory, without weights, to be edited."""
    ignore = shutil.ignore_patterns("*.safetensors")
    return shutil.copytree(golden / "target", tmp_path / "target", ignore=ignore)


@pytest.fixture
def backbone(golden, tmp_path):
    """The golden pruned backbone with its tokenizer, a directory to be edited."""
    directory = shutil.copytree(golden / "expected" / "pruned", tmp_path / "backbone")
    copy_tokenizer(golden / "source", directory)
    return directory


def edit(path, **changes):
    write(path, read(path) | changes)


def converted(source, target, out, **options):
    """Convert, and return the tensors."""
    convert(source, target, out, **options)
    return load_file(out / "model.safetensors")


def test_golden(golden, target, backbone, tmp_path):
    """Tensors are the released ones to the bit, config and alignment equal; the target's weights are not needed."""
    out, expected = tmp_path / "out", golden / "expected" / "converted"
    assert_same_tensors(converted(backbone, target, out), load_file(expected / "model.safetensors"))
    for name in ("config.json", "tokenizer_alignment.json"):
        assert read(out / name) == read(expected / name)


def test_result_is_a_drafter(golden, target, backbone, tmp_path):
    """What was written loads as a drafter, with the target's tokenizer beside it."""
    convert(backbone, target, tmp_path / "out")
    drafter = load_drafter(tmp_path / "out")
    assert drafter.config.swap_h_and_emb and not drafter.config.trims_vocabulary
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == (target / "tokenizer.json").read_bytes()
    assert (tmp_path / "out" / "chat_template.jinja").read_bytes() == (target / "chat_template.jinja").read_bytes()


def test_one_layer_is_the_midlayer(golden, target, tmp_path):
    """SGLang's name for a drafter's only layer."""
    source = write_backbone(golden / "source", tmp_path / "source", num_hidden_layers=1)
    tensors = converted(tmp_path / "source", target, tmp_path / "out")
    down = "mlp.down_proj.weight"
    np.testing.assert_array_equal(tensors[f"midlayer.{down}"], source[f"model.layers.0.{down}"])
    assert not any(name.startswith("layers.") for name in tensors)
    load_drafter(tmp_path / "out")


def test_biases_are_copied(target, tmp_path, golden):
    """Biases act after the widened products: they stay as they are, on every projection."""
    biases = {"attention_bias": True} | ({"mlp_bias": True} if golden.name == "llama" else {})
    source = write_backbone(golden / "source", tmp_path / "source", num_hidden_layers=2, **biases)
    tensors = converted(tmp_path / "source", target, tmp_path / "out")
    names = [name.removeprefix("model.") for name in source if name.endswith(".bias")]
    assert len(names) == 2 * (7 if golden.name == "llama" else 4)
    for name in names:
        np.testing.assert_array_equal(tensors[name], source[f"model.{name}"])
    load_drafter(tmp_path / "out")


def test_layers_keep_to_themselves(golden, target, tmp_path):
    """Each layer's own norm serves both halves, its own weights the stream's half, zeros the constant's."""
    source = write_backbone(golden / "source", tmp_path / "source", num_hidden_layers=3)
    tensors = converted(tmp_path / "source", target, tmp_path / "out")
    for i in range(3):
        norm = source[f"model.layers.{i}.input_layernorm.weight"]
        np.testing.assert_array_equal(tensors[f"layers.{i}.input_layernorm.weight"], norm)
        np.testing.assert_array_equal(tensors[f"layers.{i}.hidden_norm.weight"], norm)
        for name in ("q_proj", "k_proj", "v_proj"):
            constant, stream = np.split(tensors[f"layers.{i}.self_attn.{name}.weight"], 2, axis=1)
            assert not constant.any()
            np.testing.assert_array_equal(stream, source[f"model.layers.{i}.self_attn.{name}.weight"])


@pytest.mark.parametrize("width", [16, 32, 48])
def test_fc_is_the_deepest_taps_identity(golden, target, backbone, tmp_path, width):
    """For a target narrower than the drafter (32), as wide, or wider: as much of the deepest tap as fits."""
    edit(target / "config.json", hidden_size=width)
    fc_Hx3T = converted(backbone, target, tmp_path / "out")["fc.weight"]
    np.testing.assert_array_equal(fc_Hx3T, np.concatenate([np.zeros((32, 2 * width)), np.eye(32, width)], axis=1))
    assert read(tmp_path / "out" / "config.json")["target_hidden_size"] == width


def test_untied_source_gives_its_own_head(golden, target, tmp_path):
    """Embedding and head are aligned alike, each from its own table."""
    source = write_backbone(golden / "source", tmp_path / "source", num_hidden_layers=1, tie_word_embeddings=False)
    tensors = converted(tmp_path / "source", target, tmp_path / "out")
    alignment = align(load_tokenizer(tmp_path / "source"), load_tokenizer(target), 456)
    for new, old in {"embed_tokens.weight": "model.embed_tokens.weight", "lm_head.weight": "lm_head.weight"}.items():
        np.testing.assert_array_equal(tensors[new], alignment.apply(source[old]))


def test_sharded_bfloat16_source(golden, target, tmp_path):
    """Shards change nothing, and a bfloat16 source gives a bfloat16 drafter."""
    like, options = golden / "source", {"dtype": ml_dtypes.bfloat16, "num_hidden_layers": 2}
    write_backbone(like, tmp_path / "one", **options)
    write_backbone(like, tmp_path / "three", shards=3, **options)
    one = converted(tmp_path / "one", target, tmp_path / "out_one")
    assert_same_tensors(converted(tmp_path / "three", target, tmp_path / "out_three"), one)
    assert {value.dtype for name, value in one.items() if name.endswith("weight")} == {np.dtype(ml_dtypes.bfloat16)}


def test_target_tokenizer_beyond_its_config(golden, target, backbone, tmp_path):
    """A target whose config has fewer rows (440) than its tokenizer has entries (448): every id gets a row."""
    edit(target / "config.json", vocab_size=440)
    tensors = converted(backbone, target, tmp_path / "out")
    assert {tensors[name].shape[0] for name in ("embed_tokens.weight", "lm_head.weight", "t2d", "d2t")} == {448}
    config = read(tmp_path / "out" / "config.json")
    assert (config["vocab_size"], config["draft_vocab_size"]) == (448, 448)


def test_special_tokens(golden, target, backbone, tmp_path):
    """The target's config wins over its tokenizer (447, 445); what neither defines goes, the source's own too."""
    edit(backbone / "config.json", bos_token_id=1, eos_token_id=2, pad_token_id=3)
    edit(target / "config.json", eos_token_id=[447, 445])
    edit(target / "generation_config.json", bos_token_id=5, eos_token_id=[447, 445], temperature=0.6)
    convert(backbone, target, tmp_path / "out")
    config, generation = (read(tmp_path / "out" / name) for name in ("config.json", "generation_config.json"))
    assert (config["eos_token_id"], config["pad_token_id"]) == ([447, 445], 445)
    assert (generation["eos_token_id"], generation["temperature"]) == ([447, 445], 0.6)
    assert "bos_token_id" not in config and "bos_token_id" not in generation


def test_taps_are_written_where_given(target, backbone, tmp_path):
    """Given taps are the config's; without any, whoever reads the drafter takes the target's default."""
    convert(backbone, target, tmp_path / "default")
    assert "eagle_config" not in read(tmp_path / "default" / "config.json")
    convert(backbone, target, tmp_path / "given", tap_layers=(0, 3, 8))
    assert read(tmp_path / "given" / "config.json")["eagle_config"] == {
        "eagle_aux_hidden_state_layer_ids": [0, 3, 8],
        "use_aux_hidden_state": True,
    }


@pytest.mark.parametrize("taps", [(1, 3, 9), (3, 1, 5), (1, 1, 5), (-1, 3, 5)])
def test_impossible_taps(target, backbone, tmp_path, taps):
    """Taps are three different blocks of the target's 9, ascending."""
    with pytest.raises(UserError, match=re.escape(str(list(taps)))):
        convert(backbone, target, tmp_path / "out", tap_layers=taps)
    assert not (tmp_path / "out").exists()


def test_random_weights_are_the_control(target, backbone, tmp_path):
    """Same names, shapes, config and alignment, nothing of the pretrained values; a seed gives the same again."""
    real = converted(backbone, target, tmp_path / "real")
    first = converted(backbone, target, tmp_path / "first", random_seed=1)
    assert_same_tensors(converted(backbone, target, tmp_path / "again", random_seed=1), first)
    other = converted(backbone, target, tmp_path / "other", random_seed=2)
    assert {name: value.shape for name, value in first.items()} == {name: value.shape for name, value in real.items()}
    for name in ("config.json", "tokenizer_alignment.json"):
        assert read(tmp_path / "first" / name) == read(tmp_path / "real" / name)
    same = {name for name in real if np.array_equal(first[name], real[name])}
    assert same == {"fc.weight", "t2d", "d2t"}
    # The initialiser's norms are ones; every product is drawn anew.
    assert {name for name in first if np.array_equal(first[name], other[name])} - same == {
        name for name in first if "norm" in name
    }
    # The conversion is the same: the embedding is that of a fresh backbone, aligned; the constant's half is zero.
    fresh = model_tensors(CausalLM(transformer_config(backbone), rngs=nnx.Rngs(1)))["model.embed_tokens.weight"]
    alignment = align(load_tokenizer(backbone), load_tokenizer(target), 456)
    np.testing.assert_array_equal(first["embed_tokens.weight"], alignment.apply(fresh))
    assert not first["layers.1.self_attn.k_proj.weight"][:, :32].any()


def test_random_weights_keep_the_dtype(golden, target, tmp_path):
    """The control differs from the real conversion in values alone, not in precision."""
    write_backbone(golden / "source", tmp_path / "source", dtype=ml_dtypes.bfloat16, num_hidden_layers=1)
    tensors = converted(tmp_path / "source", target, tmp_path / "out", random_seed=0)
    assert tensors["midlayer.mlp.up_proj.weight"].dtype == ml_dtypes.bfloat16


def test_impossible_seed(target, backbone, tmp_path):
    with pytest.raises(UserError, match="random seed -1"):
        convert(backbone, target, tmp_path / "out", random_seed=-1)


def test_unusable_targets(target, backbone, tmp_path):
    """A target needs a config with its sizes and a tokenizer that loads: the message says where it looked."""
    cases = {
        "tokenizer.json": "target: no tokenizer files",
        "config.json": "config.json: no such file",
    }
    for name, message in cases.items():
        shutil.move(target / name, tmp_path / name)
        with pytest.raises(UserError, match=message):
            convert(backbone, target, tmp_path / "out")
        shutil.move(tmp_path / name, target / name)
    edit(target / "config.json", hidden_size=None)
    with pytest.raises(UserError, match="no usable hidden_size"):
        convert(backbone, target, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_source_tokenizer_must_fit_its_model(golden, target, tmp_path):
    """A tokenizer of 400 entries beside an embedding of 300 rows would read rows that are not there."""
    write_backbone(golden / "source", tmp_path / "source", num_hidden_layers=1, vocab_size=300)
    with pytest.raises(UserError, match="needs 400 rows, the model has only 300"):
        convert(tmp_path / "source", target, tmp_path / "out")


def test_every_tensor_is_checked(golden, target, tmp_path):
    """A source that lacks a tensor is refused by its name."""
    tensors = write_backbone(golden / "source", tmp_path / "source", num_hidden_layers=1)
    del tensors["model.norm.weight"]
    write_weights(tmp_path / "source", tensors)
    with pytest.raises(UserError, match=r"missing model\.norm\.weight"):
        convert(tmp_path / "source", target, tmp_path / "out")


def test_existing_output_is_untouched(target, backbone, tmp_path):
    """An output never overwrites another."""
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("precious")
    with pytest.raises(UserError, match="already exists"):
        convert(backbone, target, tmp_path / "out")
    assert [(path.name, path.read_text()) for path in (tmp_path / "out").iterdir()] == [("mine", "precious")]


def test_interrupted_leaves_nothing(target, backbone, tmp_path, monkeypatch):
    """An interrupt between the weights and the tokenizer leaves neither an output nor a temporary directory."""

    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "copy_tokenizer", interrupt)
    with pytest.raises(KeyboardInterrupt):
        convert(backbone, target, tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["backbone", "target"]


def test_command(target, backbone, tmp_path, monkeypatch, capsys):
    """The command hands its options on and prints the counts."""
    paths = ["--source", str(backbone), "--target", str(target), "--out", str(tmp_path / "command")]
    options = ["--tap-layers", "1", "3", "5", "--random-weights", "7"]
    monkeypatch.setattr(sys, "argv", ["convert", *paths, *options])
    command.main()
    assert "direct 323, single 0, averaged 125, unmapped 0" in capsys.readouterr().out
    want = converted(backbone, target, tmp_path / "function", tap_layers=(1, 3, 5), random_seed=7)
    assert_same_tensors(load_file(tmp_path / "command" / "model.safetensors"), want)
    assert read(tmp_path / "command" / "config.json") == read(tmp_path / "function" / "config.json")


def test_command_error_is_one_line(golden, tmp_path):
    """Bad input (a target without a config): exit status 2 and one line, no traceback."""
    (tmp_path / "target").mkdir()
    argv = ["--source", str(golden / "source"), "--target", str(tmp_path / "target"), "--out", str(tmp_path / "out")]
    done = subprocess.run([sys.executable, "-m", "osprey_jax.convert", *argv], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 1 and "config.json: no such file" in done.stderr
