"""A drafter split over two ranks of a real server."""

import os
from pathlib import Path

import pytest

from osprey_jax.decoding.generate import generate
from osprey_jax.decoding.requests import Request
from osprey_jax.decoding.speculate import speculate
from tests.decoding.conftest import prompts as random_prompts
from tests.sglang import server
from tests.sglang.models import TAPS, VOCAB, shallow_target, widened_drafter, write_drafter, write_target
from tests.sglang.server import DRAFT_STEPS, HERE, STAMP

pytestmark = [
    pytest.mark.sglang,
    pytest.mark.skipif(not (STAMP.is_file() and STAMP.read_text()), reason=f"no SGLang: run {HERE / 'install.sh'}"),
]

PROMPTS = random_prompts((5, 12, 20, 33, 40, 47), VOCAB)
LIMIT = 48
DRAFT_IDS = [i for i in range(VOCAB) if i % 7]  # 54 of them; SGLang pads the head


@pytest.fixture
def two_ranks(monkeypatch):
    """Servers start with two, a core for each where there are two."""
    cores = sorted(os.sched_getaffinity(0))
    variables = server.environment() | {"SGLANG_CPU_OMP_THREADS_BIND": f"{cores[0]}|{cores[-1]}"}
    monkeypatch.setattr(server, "environment", lambda: variables)
    monkeypatch.setattr(server, "ARGUMENTS", [*server.ARGUMENTS, "--tp-size", "2"])


def check_server(directory: Path) -> str:
    """The log of a server whose tokens, verifications and accepted drafts are the in-process engine's.

    Biases on the projections that are split by rows are where one rank too many would add.
    """
    target = shallow_target(attention_bias=True)
    drafter = widened_drafter(target, 96, noise=0.03, draft_ids=DRAFT_IDS)
    requests = [Request(prompt, LIMIT) for prompt in PROMPTS]
    engine = speculate(target, drafter, requests, tap_layers=TAPS, draft_steps=DRAFT_STEPS, stop_ids=(VOCAB,))
    plain = generate(target, requests, stop_ids=(VOCAB,))

    write_target(directory / "target", target, VOCAB)
    write_drafter(directory / "draft", drafter)
    log = directory / "server.log"
    with server.serve(directory / "target", directory / "draft", log) as started:
        answers = [started.generate(prompt, LIMIT) for prompt in PROMPTS]

    assert [a["output_ids"] for a in answers] == [r.token_ids for r in plain]
    for answer, wanted in zip(answers, engine, strict=True):
        counts = answer["meta_info"]["spec_correct_drafts_histogram"]
        assert counts + [0] * (DRAFT_STEPS + 1 - len(counts)) == list(wanted.histogram)
        assert answer["meta_info"]["spec_verify_ct"] == wanted.verifications
    accepted = sum(len(r.completion.token_ids) for r in engine) / sum(r.verifications for r in engine)
    assert accepted > 2.3, "a drafter this bad shows nothing"
    return log.read_text()


def test_server_of_two_ranks_follows_the_engine(two_ranks, tmp_path):
    """A sum over ranks that is missing, or added twice, shows as other drafts."""
    assert " TP1] " in check_server(tmp_path)
