"""Drafters in the layout of `export.to_sglang`, served by SGLang itself on the CPU, against the in-process engine."""

import json
import subprocess

import pytest

from osprey_jax.decoding.generate import generate
from osprey_jax.decoding.requests import Request
from osprey_jax.decoding.speculate import speculate
from osprey_jax.models.transformer import Llama3Scaling
from tests.decoding.conftest import prompts as random_prompts
from tests.sglang.models import (
    TAPS,
    VOCAB,
    shallow_target,
    trained_drafter,
    widened_drafter,
    write_drafter,
    write_target,
)
from tests.sglang.server import DRAFT_STEPS, HERE, STAMP, VENV, ServerDied, environment, serve

pytestmark = [
    pytest.mark.sglang,
    pytest.mark.skipif(not (STAMP.is_file() and STAMP.read_text()), reason=f"no SGLang: run {HERE / 'install.sh'}"),
]

PROMPTS = random_prompts((5, 12, 20, 33, 40, 47), VOCAB)
LIMIT = 48


def qwen3_wider():
    """As wide as the target's three states together: their projection cannot be told from a stream by its width."""
    target = shallow_target()
    return target, widened_drafter(target, 3 * target.config.hidden_size, noise=0.03)


def qwen3_trimmed():
    """Hidden sizes are equal, so that SGLang would put the target's embedding in place of the drafter's."""
    target = shallow_target()
    return target, widened_drafter(target, 32, noise=0.03, draft_ids=[i for i in range(VOCAB) if i % 9])


def llama_scaled_with_biases():
    target = shallow_target(
        qk_norm=False,
        attention_bias=True,
        rope_scaling=Llama3Scaling(8.0, 1.0, 4.0, original_max_position_embeddings=64),
    )
    return target, widened_drafter(target, 32, noise=0.03, mlp_bias=True)


def eagle3_of_one_layer():
    """A baseline: SGLang's own class, and the target's embedding."""
    target = shallow_target()
    return target, trained_drafter(target, PROMPTS, num_layers=1, steps=40)


def eagle3_of_two_layers():
    """The other baseline, the streams not swapped in ours: the target's embedding again."""
    target = shallow_target()
    return target, trained_drafter(target, PROMPTS, num_layers=2, steps=40)


CASES = [qwen3_wider, qwen3_trimmed, llama_scaled_with_biases, eagle3_of_one_layer, eagle3_of_two_layers]


@pytest.mark.parametrize("case", CASES)
def test_server_follows_the_engine(case, tmp_path):
    """Same tokens, verifications and accepted drafts, request by request; and the text is the target's own."""
    target, drafter = case()
    requests = [Request(prompt, LIMIT) for prompt in PROMPTS]
    stop_id = _late_token(generate(target, requests, stop_ids=(VOCAB,))[0].token_ids)
    plain = generate(target, requests, stop_ids=(stop_id,))
    engine = speculate(target, drafter, requests, tap_layers=TAPS, draft_steps=DRAFT_STEPS, stop_ids=(stop_id,))
    assert {r.completion.finish_reason for r in engine} == {"stop", "length"}

    write_target(tmp_path / "target", target, stop_id)
    write_drafter(tmp_path / "draft", drafter)
    with serve(tmp_path / "target", tmp_path / "draft", tmp_path / "server.log") as server:
        answers = [server.generate(prompt, LIMIT) for prompt in PROMPTS]

    assert [a["output_ids"] for a in answers] == [r.token_ids for r in plain]
    wanted = [(r.completion.token_ids, r.completion.finish_reason, r.verifications, list(r.histogram)) for r in engine]
    assert [_facts(answer) for answer in answers] == wanted
    accepted = sum(len(r.completion.token_ids) for r in engine) / sum(r.verifications for r in engine)
    assert accepted > 2.3, "a drafter this bad shows nothing"


def test_no_embedding_of_its_own(tmp_path):
    """A drafter whose stream starts as its embedding cannot do with a random one, nor with the target's."""
    target, drafter = qwen3_trimmed()
    write_target(tmp_path / "target", target, 0)
    write_drafter(tmp_path / "draft", drafter, without="embed_tokens.weight")
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


def _late_token(token_ids: list[int]) -> int:
    """The one whose first occurrence comes last."""
    return max(set(token_ids), key=token_ids.index)


def _facts(answer: dict) -> tuple:
    meta = answer["meta_info"]
    assert meta["completion_tokens"] == len(answer["output_ids"])
    return answer["output_ids"], meta["finish_reason"]["type"], meta["spec_verify_ct"], _histogram(meta)


def _histogram(meta: dict) -> list[int]:
    counts = meta["spec_correct_drafts_histogram"]
    return counts + [0] * (DRAFT_STEPS + 1 - len(counts))
