import dataclasses
import json
import shutil
from pathlib import Path

import pytest

from osprey_jax.command import UserError
from osprey_jax.decoding.target import open_target

TARGET = Path(__file__).parents[1] / "golden/qwen3/target"
QUESTION = [{"role": "user", "content": "of it"}]
ASKED = "<|im_start|>user\nof it<|im_end|>\n<|im_start|>assistant\n"


def test_a_prompt_ends_where_the_assistant_begins():
    """The template's own header of the turn to come, as serving renders it."""
    target = open_target(TARGET, {})
    assert target.tokenizer.decode(target.prompt_ids(QUESTION)) == ASKED


def test_the_tokenizer_adds_nothing_to_the_template(tmp_path):
    """A tokenizer that puts a token before every text would put a second one where the template has it already."""
    copy = tmp_path / "target"
    shutil.copytree(TARGET, copy)
    tokenizer = json.loads((copy / "tokenizer.json").read_text())
    first = {"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}}
    tokenizer["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [first, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<|endoftext|>": {"id": "<|endoftext|>", "ids": [445], "tokens": ["<|endoftext|>"]}},
    }
    (copy / "tokenizer.json").write_text(json.dumps(tokenizer))
    target = open_target(copy, {})
    assert target.tokenizer("of it")["input_ids"][0] == 445, "the case shows nothing"
    assert target.prompt_ids(QUESTION) == open_target(TARGET, {}).prompt_ids(QUESTION)


def test_the_terminator_is_no_part_of_the_text():
    """The token that ended a turn goes, special or not, and so do special tokens within."""
    target = open_target(TARGET, {})
    ids = target.tokenizer("of it", add_special_tokens=False)["input_ids"]
    assert target.text([*ids, target.stop_ids[-1]]) == target.text([445, *ids]) == target.text(ids) == "of it"
    [end] = target.tokenizer("!", add_special_tokens=False)["input_ids"]
    assert target.text([*ids, end]) == "of it!"
    assert dataclasses.replace(target, stop_ids=(end,)).text([*ids, end]) == "of it"
    assert target.text([]) == ""


def test_a_tokenizer_of_another_model_is_refused(tmp_path):
    """Ids past the embedding would be read as its last row."""
    copy = tmp_path / "target"
    shutil.copytree(TARGET, copy)
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | {"vocab_size": 300}))
    with pytest.raises(UserError, match="tokenizer needs"):
        open_target(copy, {})
