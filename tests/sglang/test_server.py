"""Drafters that this project trained and exported, served by SGLang on the CPU, against the in-process engine."""

import json
import subprocess

import numpy as np
import pytest
from safetensors.numpy import load_file

from osprey_jax.decoding.generate import generate
from osprey_jax.decoding.speculate import speculate
from osprey_jax.models.hf import load_drafter
from osprey_jax.models.hf_config import check_tap_layers
from osprey_jax.models.transformer import Llama3Scaling
from tests.sglang.models import TAPS, shallow_target, widened_drafter, write_drafter, write_target
from tests.sglang.server import DRAFT_STEPS, HERE, STAMP, VENV, ServerDied, environment, serve
from tests.sglang.trained import ASKED, converted, from_scratch, make_family, trained

pytestmark = [
    pytest.mark.sglang,
    pytest.mark.skipif(not (STAMP.is_file() and STAMP.read_text()), reason=f"no SGLang: run {HERE / 'install.sh'}"),
]

LIMIT = 48


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory):
    return make_family(tmp_path_factory.mktemp("qwen3"))


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    scaling = Llama3Scaling(8.0, 1.0, 4.0, original_max_position_embeddings=64)
    changes = {"qk_norm": False, "attention_bias": True, "rope_scaling": scaling}
    return make_family(tmp_path_factory.mktemp("llama"), **changes)


def qwen3_equal(family, folder):
    """Hidden sizes are equal: SGLang alone would put the target's embedding in place of the drafter's."""
    return trained(family, converted(family, folder, width=32), steps=60)


def qwen3_wider_with_taps(family, folder):
    """As wide as the target's three states together: their projection cannot be told from a stream by its width."""
    return trained(family, converted(family, folder, width=96, taps=TAPS), steps=60)


def qwen3_trimmed(family, folder):
    """The head writes the commonest tokens alone, under ids of its own."""
    return trained(family, converted(family, folder, width=32), steps=60, draft_vocab_size=64)


def llama_scaled_with_biases(family, folder):
    return trained(family, converted(family, folder, width=40, taps=TAPS, mlp_bias=True), steps=60)


def qwen3_eagle3_of_one_layer(family, folder):
    """A baseline: SGLang's own class, and the target's embedding."""
    return trained(family, from_scratch(family, folder, num_layers=1, taps=TAPS), steps=240)


def qwen3_eagle3_of_two_layers(family, folder):
    """The other baseline, the streams not swapped in ours: the target's embedding again."""
    return trained(family, from_scratch(family, folder, num_layers=2, taps=TAPS), steps=160)


CASES = [
    qwen3_equal,
    qwen3_wider_with_taps,
    qwen3_trimmed,
    llama_scaled_with_biases,
    qwen3_eagle3_of_one_layer,
    qwen3_eagle3_of_two_layers,
]


@pytest.mark.parametrize("case", CASES)
def test_server_follows_the_engine(case, request, tmp_path):
    """Same tokens, verifications and accepted drafts, request by request; and the text is the target's own."""
    family = request.getfixturevalue(case.__name__.split("_")[0])
    export = case(family, tmp_path)
    norms = {name: np.abs(value) for name, value in load_file(export / "model.safetensors").items() if "norm" in name}
    assert min(value.max() / value.min() for value in norms.values()) > 3, "hides what is normed and what is not"

    chat, drafter, requests = family.chat, load_drafter(export), family.requests(LIMIT)
    taps = check_tap_layers(drafter.config.tap_layers, family.model.config.num_layers)
    plain = generate(family.model, requests, stop_ids=chat.stop_ids)
    options = {"draft_steps": DRAFT_STEPS, "stop_ids": chat.stop_ids}
    engine = speculate(family.model, drafter, requests, tap_layers=taps, **options)
    off_by_one = speculate(family.model, drafter, requests, tap_layers=tuple(tap + 1 for tap in taps), **options)
    assert [r.histogram for r in off_by_one] != [r.histogram for r in engine], "hides which states it reads"
    with serve(family.target, export, tmp_path / "server.log") as server:
        answers = [server.generate(request.prompt, LIMIT) for request in requests]

    assert [(a["output_ids"], a["text"]) for a in answers] == [(r.token_ids, chat.text(r.token_ids)) for r in plain]
    wanted = [(r.completion.token_ids, r.completion.finish_reason, r.verifications, list(r.histogram)) for r in engine]
    assert [_facts(answer) for answer in answers] == wanted
    assert {answer["meta_info"]["finish_reason"]["type"] for answer in answers} == {"stop", "length"}
    known = [answer["meta_info"] for answer in answers[:ASKED]]
    accepted = sum(meta["completion_tokens"] for meta in known) / sum(meta.get("spec_verify_ct", 0) for meta in known)
    assert accepted > 3, "a drafter this bad shows nothing"


def test_no_embedding_of_its_own(tmp_path):
    """A drafter whose stream starts as its embedding cannot do with a random one, nor with the target's."""
    target = shallow_target()
    write_target(tmp_path / "target", target, 0)
    write_drafter(tmp_path / "draft", widened_drafter(target, 32, noise=0.03), without="embed_tokens.weight")
    with (
        pytest.raises(ServerDied, match=r"ValueError: draft model \S+/draft: missing embed_tokens.weight; "),
        serve(tmp_path / "target", tmp_path / "draft", tmp_path / "server.log"),
    ):
        pass


def test_refusals():
    """Whatever the package would otherwise ignore is named: keys of a config, tensors, shapes, maps."""
    done = subprocess.run(
        [str(VENV / "bin" / "python"), str(HERE / "refusals.py")],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    wrong = {case: message for case, (word, message) in found.items() if word not in message}
    assert not wrong
    assert found["sound"] == found["sound config"] == ["", ""]


def test_install_spares_other_directories(tmp_path):
    """A mistyped path is not deleted."""
    (tmp_path / "file").touch()
    done = subprocess.run([str(HERE / "install.sh"), str(tmp_path)], capture_output=True, text=True, timeout=10)
    assert done.returncode == 2 and "was not made by this script" in done.stderr
    assert (tmp_path / "file").exists()


def _facts(answer: dict) -> tuple:
    """What the engine says of a request too. An answer of one token is the prompt's: SGLang counts nothing then."""
    meta, ids = answer["meta_info"], answer["output_ids"]
    assert meta["completion_tokens"] == len(ids)
    meta = {"spec_verify_ct": 0, "spec_correct_drafts_histogram": []} | meta if len(ids) == 1 else meta
    return ids, meta["finish_reason"]["type"], meta["spec_verify_ct"], _histogram(meta)


def _histogram(meta: dict) -> list[int]:
    counts = meta["spec_correct_drafts_histogram"]
    return counts + [0] * (DRAFT_STEPS + 1 - len(counts))
