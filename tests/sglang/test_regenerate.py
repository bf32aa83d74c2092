"""Regeneration behind SGLang itself, against the target in this process."""

import json
import shutil

import pytest
from safetensors.numpy import load_file, save_file

from osprey_jax.config import RegenerateConfig
from osprey_jax.data.tokenizer import load_tokenizer, rows_needed
from osprey_jax.decoding.target import open_target
from osprey_jax.regenerate import regenerate
from tests.conftest import GOLDEN
from tests.decoding.fake_server import read, write
from tests.sglang.server import HERE, STAMP, ServerDied, serve

pytestmark = [
    pytest.mark.sglang,
    pytest.mark.skipif(not (STAMP.is_file() and STAMP.read_text()), reason=f"no SGLang: run {HERE / 'install.sh'}"),
]

TEXTS = ["The license", "all of the work", "software", "of it", "free software " * 4, "You may"]


def target_without_padding(out):
    """The golden target with as many rows as its tokenizer: ids beyond it, which no trained model writes, SGLang shows
    as token 0, and we do not at all."""
    golden = GOLDEN / "qwen3/target"
    shutil.copytree(golden, out)
    rows = rows_needed(load_tokenizer(golden))
    tensors = load_file(golden / "model.safetensors")
    ends = {name: tensor for name, tensor in tensors.items() if "embed_tokens" in name or "lm_head" in name}
    assert len(ends) == 2
    save_file(tensors | {name: tensor[:rows] for name, tensor in ends.items()}, out / "model.safetensors")
    (out / "config.json").write_text(
        json.dumps(json.loads((golden / "config.json").read_text()) | {"vocab_size": rows})
    )
    return out


def test_records_are_those_of_this_process(tmp_path, capsys):
    """Greedy: the same answers, turn by turn, the same ends, also near the context's; prompts of the same length."""
    system = {"role": "system", "content": "Be brief"}
    asked = [
        [system] * (i % 2) + [{"role": "user", "content": text} for text in (TEXTS[i:] + TEXTS[:i])[: 1 + i % 3]]
        for i in range(len(TEXTS))
    ]
    records = [{"id": str(i), "conversations": messages} for i, messages in enumerate(asked)]
    records.append({"id": "long", "conversations": [{"role": "user", "content": "free software " * 300}]})
    target = target_without_padding(tmp_path / "target")
    chat = open_target(target, {})
    near = next(
        messages
        for count in range(600)
        if len(chat.prompt_ids(messages := [{"role": "user", "content": "of " * count}])) >= chat.context - 10
    )
    records.append({"id": "near", "conversations": near})
    write(tmp_path / "in.jsonl", records)
    common = {"target": target, "input": [str(tmp_path / "in.jsonl")], "max_new_tokens": 24}
    here = RegenerateConfig(**common, output=tmp_path / "here.jsonl")
    regenerate(here)
    try:
        with serve(target, None, tmp_path / "server.log") as server:
            behind = RegenerateConfig(**common, output=tmp_path / "behind.jsonl", servers=[server.url], concurrency=3)
            regenerate(behind)
    except ServerDied as error:
        pytest.fail(str(error))
    assert read(behind.output) == read(here.output)
    assert [line["id"] for line in read(tmp_path / "behind.jsonl.rejected")] == ["long"]
    assert "another tokenizer" not in capsys.readouterr().err
    assert len({json.dumps(record["conversations"][-1]) for record in read(here.output)}) > 3, "shows nothing"
