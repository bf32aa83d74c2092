"""Loading a checkpoint's tokenizer."""

import json
import shutil

import pytest
import tokenizers
from tokenizers import pre_tokenizers

from osprey_jax.command import UserError
from osprey_jax.data.tokenizer import load_tokenizer
from tests.real_tokenizers import real_tokenizer


def test_model_without_tokenizer(golden, tmp_path):
    """transformers makes an empty tokenizer of a config alone: everything after would train on nothing."""
    shutil.copyfile(golden / "target" / "config.json", tmp_path / "config.json")
    with pytest.raises(UserError, match="no tokenizer files"):
        load_tokenizer(tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(golden / "target" / name, tmp_path / name)
    assert len(load_tokenizer(tmp_path)) == 448


def declare(directory, tokenizer_class, model_type):
    """Put the names into a checkpoint's files, from which transformers chooses a class."""
    path = directory / "tokenizer_config.json"
    config = json.loads(path.read_text()) if path.is_file() else {}
    path.write_text(json.dumps(config | {"tokenizer_class": tokenizer_class}))
    (directory / "config.json").write_text(json.dumps({"model_type": model_type}))


def assert_as_written(directory, text):
    """The loaded tokenizer does what tokenizer.json says."""
    written = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
    ids = written.encode(text, add_special_tokens=False).ids
    loaded = load_tokenizer(directory)
    assert loaded(text, add_special_tokens=False)["input_ids"] == ids
    assert loaded.decode(ids) == text


@pytest.mark.parametrize("tokenizer_class", ["LlamaTokenizerFast", "Qwen2Tokenizer", "GPT2Tokenizer"])
@pytest.mark.parametrize("model_type", ["llama", "qwen2", "deepseek_v3"])
def test_class_with_a_pre_tokenizer_of_its_own(make_tokenizer, tmp_path, tokenizer_class, model_type):
    """Whatever class the files name, tokenizer.json decides how text is split."""
    tokenizer = make_tokenizer()
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split("e", "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.backend_tokenizer.save(str(tmp_path / "tokenizer.json"))
    declare(tmp_path, tokenizer_class, model_type)
    assert_as_written(tmp_path, " hello  yes yes\n\nno 123🙂")


@pytest.mark.network
@pytest.mark.parametrize("model_type", ["deepseek_v3", "qwen2"])
def test_deepseek(tmp_path, model_type):
    """DeepSeek's files name Llama's class, and its distillations are of Qwen's model type."""
    shutil.copytree(real_tokenizer("deepseek_v3"), tmp_path, dirs_exist_ok=True)
    declare(tmp_path, "LlamaTokenizerFast", model_type)
    assert_as_written(tmp_path, "Hello  world 12345 你好 🙂\n\n\tdef f(x): don't <｜User｜>")


@pytest.mark.network
@pytest.mark.parametrize("name", ["qwen3", "llama3_1", "gptoss"])
def test_other_released_tokenizers(name):
    """Their files are loaded as they are written, with their ends of text."""
    assert_as_written(real_tokenizer(name), "Hello  world 12345 你好 🙂\n\n\tdef f(x): don't stop")
    assert load_tokenizer(real_tokenizer(name)).eos_token
