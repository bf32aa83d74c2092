"""`export.check`: a sound export passes, and each fault planted in a copy of one is named."""

import dataclasses
import json
import re

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from export import check
from export.reference import FILE, Reference, Seen, trainer_forward
from export.replay import Replay
from export.rows import Row, batch_of
from export.target_pass import run_target
from osprey_jax.models import hf
from tests.conftest import GOLDEN
from tests.decoding.conftest import alike
from tests.export.exports import (
    CASES,
    change_config,
    change_tensors,
    eagle3_of_one_layer,
    llama_scaled_with_biases,
    qwen3_equal,
    qwen3_trimmed,
    qwen3_wider,
    to_bfloat16,
)
from tests.sglang.models import TAPS, write_drafter, write_target


@pytest.fixture
def checked(good, tmp_path, run_command):
    """`checked(case, plant=None, *options) -> (status, stdout, stderr)`: of a copy in which `plant(copy, good)` ran."""

    def call(case, plant=None, *options):
        found = good(case)
        directory = found.copy(tmp_path / "export")
        if plant is not None:
            plant(directory, found)
        return run_command(check.main, "--export", directory, "--target", found.target_dir, *options)

    return call


@pytest.mark.parametrize("case", CASES)
def test_a_sound_export_passes(checked, case):
    """Every kind of drafter, in a table by step, with no word on stderr."""
    status, out, err = checked(case)
    assert (status, err) == (0, "") and out.endswith("no fault found\n")
    assert len([line for line in out.splitlines() if "100.0%" in line]) == 5 and "accepted length " in out


def test_a_sound_export_in_bfloat16_passes(checked):
    """Rounding is not a fault."""
    assert checked(qwen3_equal, lambda directory, _: change_tensors(directory, to_bfloat16))[0] == 0


# ---- faults in config.json


def config_with(**changes):
    return lambda directory, _: change_config(directory, **changes)


def taps(*layers):
    ids = {"eagle_aux_hidden_state_layer_ids": list(layers), "use_aux_hidden_state": True}
    return config_with(eagle_config=ids)


PLAIN = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}, "rope_theta": 1e4, "rope_scaling": None}
LLAMA, QWEN3 = "LlamaForCausalLMEagle3", "Qwen3ForCausalLMEagle3"
AGREES = r".*\(so repaired, the replay agrees with what was trained\)"


@pytest.mark.parametrize(
    ("case", "plant", "message"),
    [
        (qwen3_equal, taps(1, 2, 6), r"tap ids off by one: .* are \[1, 2, 6\], trained were \[0, 1, 5\]" + AGREES),
        (qwen3_equal, taps(0, 2, 5), r"tap ids wrong: .* are \[0, 2, 5\], trained were \[0, 1, 5\]" + AGREES),
        (qwen3_equal, taps(0, 1, 7), r"tap ids wrong.*; .*layer_ids: tap layers \[0, 1, 7\] are not three"),
        (
            qwen3_equal,
            taps(0, 1),
            r"tap ids wrong: .* are \[0, 1\], trained were .*; .*\[0, 1\] are not three different",
        ),
        (qwen3_equal, config_with(eagle_config=None), r"tap ids wrong: .* are \[1, 2, 3\], trained were \[0, 1, 5\]"),
        (llama_scaled_with_biases, config_with(**PLAIN), "RoPE scaling lost: .*'factor': 8.0" + AGREES),
        (
            qwen3_equal,
            config_with(rope_theta=5e5, rope_parameters={"rope_type": "default", "rope_theta": 5e5}),
            r"RoPE changed: config.json says theta 500000, .* trained was theta 10000" + AGREES,
        ),
        (qwen3_equal, config_with(rope_theta=5e5), "rope_parameters .* disagree with rope_theta"),
        (qwen3_equal, config_with(swap_h_and_emb=False), "streams swapped: .* is false, trained was true" + AGREES),
        (qwen3_equal, config_with(tie_word_embeddings=True), "head tied: tie_word_embeddings is true"),
        (qwen3_equal, config_with(norm_output=True), "stream normed: norm_output"),
        (qwen3_equal, config_with(norm_before_residual=True), "stream normed: norm_before_residual"),
        (qwen3_equal, config_with(norm_before_fc=True), "changed before fc: norm_before_fc"),
        (qwen3_equal, config_with(architectures=[LLAMA]), f"wrong architecture: {LLAMA} with model_type 'qwen3'"),
        (
            qwen3_equal,
            config_with(architectures=["Qwen3ForCausalLM"]),
            "wrong architecture: 'Qwen3ForCausalLM' is none",
        ),
        (
            qwen3_equal,
            config_with(architectures=[LLAMA], model_type="llama"),
            r"architecture: .*k_norm.weight, which only",
        ),
        (
            llama_scaled_with_biases,
            config_with(architectures=[QWEN3], model_type="qwen3"),
            "wrong architecture: .* lacks the q_norm and k_norm of Qwen3",
        ),
        (llama_scaled_with_biases, config_with(mlp_bias=False), r"unexpected tensor layers.0.mlp.down_proj.bias"),
        (qwen3_equal, config_with(max_position_embeddings=128), "max_position_embeddings is 128, the target has 256"),
        (qwen3_equal, config_with(osprey_layout=2), "osprey_layout is 2, this reads 1"),
        (qwen3_equal, config_with(num_hidden_layers=1), "no tensor midlayer"),
        (
            qwen3_trimmed,
            config_with(draft_vocab_size=64),
            r"lm_head.weight has shape \(56, 32\), .* asks for \(64, 32\)",
        ),
    ],
)
def test_config_faults_are_named(checked, case, plant, message):
    """Each is one line on stderr, with what is wrong."""
    assert_named(checked(case, plant), message)


def assert_named(result, message):
    status, out, err = result
    assert status == 2 and err.startswith("error: ") and err.count("\n") == 1 and "no fault" not in out
    assert re.search(message, err), err


# ---- faults in the tensors


def tensors_with(change):
    return lambda directory, found: change_tensors(directory, lambda tensors: change(tensors, found))


def target_embedding(tensors, found):
    tensors["embed_tokens.weight"] = load_file(found.target_dir / "model.safetensors")["model.embed_tokens.weight"]


def without(name):
    return tensors_with(lambda tensors, _: tensors.pop(name))


def replaced(name, change):
    return tensors_with(lambda tensors, _: tensors.update({name: change(tensors[name])}))


def two_faults(directory, found):
    change_config(directory, tie_word_embeddings=True)
    change_tensors(directory, lambda tensors: tensors.update({"norm.weight": 2 * tensors["norm.weight"]}))


def nothing_finite(value):
    return np.where(np.arange(len(value)) == 3, np.nan, value).astype(np.float32)


@pytest.mark.parametrize(
    ("case", "plant", "message"),
    [
        (qwen3_equal, tensors_with(target_embedding), "embedding equal to the target's: "),
        (qwen3_equal, without("lm_head.weight"), "head missing: no tensor lm_head.weight"),
        (qwen3_equal, without("embed_tokens.weight"), "embedding missing: no tensor embed_tokens.weight"),
        (qwen3_equal, without("layers.1.mlp.up_proj.weight"), "no tensor layers.1.mlp.up_proj.weight"),
        (qwen3_trimmed, replaced("d2t", lambda d2t: d2t + np.arange(len(d2t))), "d2t not offsets: it holds target ids"),
        (qwen3_equal, replaced("d2t", lambda d2t: d2t + np.arange(len(d2t))), "d2t not offsets: it holds target ids"),
        (qwen3_trimmed, replaced("d2t", lambda d2t: d2t + 1), "d2t and t2d disagree"),
        (qwen3_trimmed, without("t2d"), "no tensor t2d"),
        (qwen3_equal, replaced("norm.weight", lambda norm: 1.01 * norm), "not the tensors .* trained: norm.weight"),
        (qwen3_equal, replaced("norm.weight", lambda norm: norm[1:]), r"norm.weight has shape \(31,\), .* for \(32,\)"),
        (qwen3_equal, replaced("norm.weight", nothing_finite), "norm.weight holds values that are not finite"),
        (
            eagle3_of_one_layer,
            replaced("embed_tokens.weight", np.flip),
            "embed_tokens.weight is not the target's, which",
        ),
        (
            qwen3_equal,
            two_faults,
            "head tied: .*; not the tensors that were trained: norm.weight .*; the replay differs",
        ),
    ],
)
def test_tensor_faults_are_named(checked, case, plant, message):
    """Each is one line on stderr, with the tensor."""
    assert_named(checked(case, plant), message)


# ---- faults that only numbers show: what was trained is not what config.json says


def seen_as(found, **changes) -> Seen:
    """What a trainer with another idea of serving would have recorded."""
    comparison, serving = found.comparison, dataclasses.replace(found.serving, **changes)
    replay, taps_RxSx3T = Replay(comparison.exported, serving), comparison.passed.taps(serving.tap_layers)
    table = comparison.exported.tensors["embed_tokens.weight"]
    if serving.target_embedding:
        table = load_file(found.target_dir / "model.safetensors")["model.embed_tokens.weight"]
    streams = [
        replay.streams(table[row.token_ids_S], taps[: len(row.token_ids_S)], row.points_P, comparison.steps)
        for row, taps in zip(comparison.rows, taps_RxSx3T, strict=True)
    ]
    logits = replay.logits(np.concatenate([np.stack(part) for part in streams], axis=1))
    top = np.argsort(-logits, axis=-1)[..., :16]
    total = np.log(np.exp(logits - logits.max(-1, keepdims=True)).sum(-1)) + logits.max(-1)
    return Seen(
        replay.target_ids(top[..., 0]), top, np.take_along_axis(logits, top, axis=-1), total, logits.std(axis=-1)
    )


@pytest.mark.parametrize(
    ("case", "changes", "message"),
    [
        (
            qwen3_equal,
            {"normed_stream": True},
            "stream normed: training handed on the stream after the final norm" + AGREES,
        ),
        (
            qwen3_equal,
            {"tap_layers": (1, 2, 6)},
            r"tap ids off by one: .* are \[0, 1, 5\], trained were \[1, 2, 6\]" + AGREES,
        ),
        (qwen3_wider, {"swap": False}, "streams swapped: swap_h_and_emb is true, trained was false" + AGREES),
        (
            qwen3_equal,
            {"target_embedding": True},
            "embedding: trained with the target's, served with embed_tokens.weight" + AGREES,
        ),
    ],
)
def test_faults_of_the_trainer_are_named(checked, case, changes, message):
    """Where config and tensors are those of the run, but mean something else to servers."""

    def plant(directory, found):
        reference = Reference.load(directory)
        dataclasses.replace(reference, seen=seen_as(found, **changes)).save(directory)

    assert_named(checked(case, plant), message)


def test_another_target(good, tmp_path, run_command):
    """Features of another target are another input: said, where the numbers differ."""
    found, other = good(qwen3_equal), good(eagle3_of_one_layer)
    model = hf.load_causal_lm(found.target_dir)
    model.layers.mlp.down_proj.weight[...] *= 1.5
    write_target(tmp_path / "other", model, 0)
    result = run_command(check.main, "--export", found.directory, "--target", tmp_path / "other")
    assert_named(result, "no single known repair mends it: at step 0, .* is not the target that it was trained against")
    assert run_command(check.main, "--export", found.directory, "--target", other.target_dir)[0] == 0  # a copy


@pytest.mark.parametrize(
    ("change", "message"),
    [({"target_hidden_size": 48}, r"fc.weight has shape"), ({"vocab_size": 65}, "embed_tokens.weight has shape")],
)
def test_sizes_of_the_config(checked, change, message):
    """A config of another target does not fit the tensors."""
    assert_named(checked(qwen3_equal, config_with(**change)), message)


def test_made_for_another_target(good, run_command):
    """Widths or vocabulary of the drafter's target are not this one's."""
    result = run_command(check.main, "--export", good(qwen3_equal).directory, "--target", GOLDEN / "qwen3" / "target")
    assert_named(result, "target_hidden_size is 32, the target's is 48: .* vocab_size is 64, the target's is 456")


def test_another_tokenizer(checked):
    """Ids that mean other text than the target's are a fault; another chat template is only worth a word."""

    def plant(directory, found):
        for name in ("tokenizer.json", "chat_template.jinja"):
            (directory / name).write_bytes((found.target_dir / name).read_bytes() + b" ")

    status, _, err = checked(qwen3_equal, plant)
    assert status == 2 and "tokenizer.json is not the target's" in err.splitlines()[-1]
    assert err.splitlines()[0].startswith("warning: ") and "chat_template.jinja is not the target's" in err


# ---- without the run's own word


def test_nothing_to_compare_with(checked):
    """A drafter without a reference needs records, and the message says so."""
    assert_named(
        checked(qwen3_equal, lambda directory, _: (directory / FILE).unlink()), "holds no check.npz .* --records"
    )


@pytest.fixture
def foreign(tmp_path):
    """(target, drafter) directories without a reference; tapping block 0 does harm.

    The drafter is its target's first two blocks; on the constant's half its projections are random, but `fc` takes the
    difference of two taps, and blocks from 2 on add nothing.
    """
    target, drafter = alike(3, noise=0.01, vocab_size=456)
    rng = np.random.default_rng(0)
    width = target.config.hidden_size
    for layer in drafter.layers:
        for projection in (layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj):
            weight = np.array(projection.weight[...])
            weight[:, :width] = 0.1 * rng.standard_normal((len(weight), width))
            projection.weight[...] = jnp.asarray(weight)
    eye = np.eye(width, dtype=np.float32)
    drafter.fc.weight[...] = jnp.asarray(np.concatenate([eye, -eye, 0 * eye], axis=1))
    write_target(tmp_path / "target", target, 0)
    write_drafter(tmp_path / "draft", drafter)
    return tmp_path / "target", tmp_path / "draft"


def test_records_in_place_of_a_reference(foreign, run_command):
    """Another project's files are compared with our drafter read from them; serving that drafts worse is warned of."""
    target, directory = foreign
    options = ("--target", target, "--records", GOLDEN / "qwen3" / "train.jsonl")
    taps(1, 2, 3)(directory, None)
    status, out, err = run_command(check.main, "--export", directory, *options)
    assert (status, err) == (0, "") and "the drafter as this project reads it" in out
    taps(0, 1, 2)(directory, None)
    status, out, err = run_command(check.main, "--export", directory, *options)
    assert status == 0 and "tap ids off by one: " in err and "trained were [1, 2, 3]?" in err and err.count("\n") == 1


def test_records_that_cannot_be_used(foreign, tmp_path, run_command):
    """No answer to draft is one line."""
    target, directory = foreign
    taps(1, 2, 3)(directory, None)
    (tmp_path / "bad.jsonl").write_text(json.dumps({"conversations": [{"role": "user", "content": "Hello"}]}))
    result = run_command(check.main, "--export", directory, "--target", target, "--records", tmp_path / "bad.jsonl")
    assert_named(result, "bad.jsonl: no conversation with an answer")


def test_steps_that_read_beyond_every_row(good):
    """Where conversations are short, a late step has nothing to compare: no fault."""
    found = good(qwen3_equal)
    rows = [
        Row(row.token_ids_S[: row.turns[0][0] + 3], ((row.turns[0][0], row.turns[0][0] + 2),)) for row in found.rows
    ]
    passed = run_target(found.target_dir, batch_of(rows), TAPS)
    seen = trainer_forward(found.drafter, rows, passed.taps(TAPS), 5)
    comparison = dataclasses.replace(found.comparison, rows=rows, passed=passed, seen=seen)
    replayed = comparison.replay(found.serving)
    agreement = comparison.agreement(replayed)
    assert agreement.points_K.tolist() == [4, 4, 4, 0, 0] and agreement.holds
    assert comparison.accepted_lengths(replayed) == [2.0] * 4


def test_what_counts_as_the_same_token(good):
    """Of tokens with one logit either may be drafted; one with a larger logit, or under another id, is another."""
    found = good(qwen3_trimmed)
    comparison = found.comparison
    replayed = comparison.replay(found.serving)
    assert comparison.agreement(replayed._replace(best_KxP=replayed.best_KxP + 1)).holds
    larger = replayed._replace(best_logit_KxP=replayed.best_logit_KxP + 1)
    renamed = replayed._replace(trainers_KxP=replayed.trainers_KxP + 1)
    assert comparison.agreement(larger).share_K.max() == comparison.agreement(renamed).share_K.max() == 0
