"""The classes of `osprey_sgl_models` in both versions of SGLang, on whole checkpoints: their results, and refusals."""

import numpy as np
import pytest

from osprey_jax.models.transformer import Llama3Scaling
from tests.decoding.conftest import drafter as random_drafter
from tests.sglang.drafts import RELEASES, change_config, external, reference, served, write_draft
from tests.sglang.server import HERE, STAMP

pytestmark = [
    pytest.mark.sglang,
    pytest.mark.skipif(not (STAMP.is_file() and STAMP.read_text()), reason=f"no SGLang: run {HERE / 'install.sh'}"),
]

ODD = {"vocab_size": 61, "head_dim": 16}  # what ranks do not divide
TRIMMED = [i for i in range(61) if i % 9]
LLAMA = {"qk_norm": False} | ODD
SCALING = Llama3Scaling(8.0, 1.0, 4.0, original_max_position_embeddings=4)

DRAFTERS = {
    "qwen3": lambda: random_drafter(1, hidden_size=48, attention_bias=True, draft_ids=TRIMMED, num_kv_heads=1, **ODD),
    "llama": lambda: random_drafter(2, attention_bias=True, mlp_bias=True, rope_scaling=SCALING, **LLAMA),
    "llama_released": lambda: DRAFTERS["llama"](),  # with the keys of transformers 4 alone
    "llama_one_layer_biases": lambda: random_drafter(3, swap=False, num_layers=1, attention_bias=True, **LLAMA),
    "eagle3_two_layers": lambda: random_drafter(4, swap=False, **LLAMA),
    "eagle3": lambda: random_drafter(5, swap=False, num_layers=1, draft_ids=TRIMMED, **LLAMA),
}


def check(found: dict, wanted: dict) -> None:
    assert "error" not in found, found["error"]
    for name in ("logits", "streams"):
        scale = np.abs(wanted[name]).max()
        np.testing.assert_allclose(found[name] / scale, wanted[name] / scale, rtol=0, atol=1e-5)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("version", RELEASES)
def test_logits_are_ours(version, ranks, tmp_path):
    """Every kind of drafter, on one rank and split over two: widths, heads and vocabularies that two do not divide."""
    drafters = {name: make() for name, make in DRAFTERS.items()}
    drafts = [write_draft(tmp_path / name, drafter) for name, drafter in drafters.items()]
    change_config(tmp_path / "llama_released", remove="rope_parameters")
    how = external(version)
    found, _ = served(drafts, tmp_path / "out", *how["paths"], package=how["package"], ranks=ranks)
    for result, (name, drafter), draft in zip(found, drafters.items(), drafts, strict=True):
        check(result, reference(drafter, draft))
        stock = name == "eagle3"
        assert result["module"] == ("sglang.srt.models.llama_eagle3" if stock else "osprey_sgl_models.eagle3")


@pytest.fixture(scope="module", params=RELEASES)
def refusals(request, tmp_path_factory):
    """{name of a spoilt draft: the message}, and the log."""
    directory = tmp_path_factory.mktemp("refusals")
    swapped, llama, eagle3 = random_drafter(1, **ODD), random_drafter(2, **LLAMA), DRAFTERS["eagle3"]()
    eagle = lambda taps: {"eagle_aux_hidden_state_layer_ids": taps, "use_aux_hidden_state": True}
    own_table = np.asarray(swapped.embed_tokens.weight[...])

    def write(name, drafter, changes=(), **rest):
        return change_config(write_draft(directory / name, drafter, **rest), **dict(changes))

    drafts = [
        write("sound", swapped, target_embedding=own_table[::-1].copy()),
        write("layout 1", swapped, {"osprey_layout": 1}),
        write("layout 2", swapped, {"osprey_layout": 2}),
        write("layout 2 of SGLang's class", eagle3, {"osprey_layout": 2}),
        write("no embedding", swapped, without="embed_tokens.weight"),
        write("qwen3 called llama", swapped, {"architectures": ["LlamaForCausalLMEagle3"]}),
        write("llama called qwen3", llama, {"architectures": ["Qwen3ForCausalLMEagle3"]}),
        write("taps in another order", swapped, {"eagle_config": eagle([1, 0, 5])}),
        write("a tap twice", swapped, {"eagle_config": eagle([1, 1, 5])}),
        write("a negative tap", swapped, {"eagle_config": eagle([-1, 1, 5])}),
        write("features of two blocks", swapped, features=np.zeros((7, 64), np.float32)),
        write("the target's embedding", swapped, target_embedding=own_table),
    ]
    how = external(request.param)
    found, log = served(drafts, directory / "out", *how["paths"], package=how["package"])
    return {draft.name: str(result.get("error", "")) for draft, result in zip(drafts, found, strict=True)}, log, found


def test_refusals_name_what_is_wrong(refusals):
    """What would serve another model, or fail later in other words, is one line that says which draft and what."""
    messages = refusals[0]
    words = {
        "layout 2": "osprey_layout 2 in config.json, and this is for 1: the drafter was written by a newer osprey-jax",
        "layout 2 of SGLang's class": "osprey_layout 2 ",
        "no embedding": "missing embed_tokens.weight;",
        "qwen3 called llama": "unexpected layers.0.self_attn.k_norm.weight, ",
        "llama called qwen3": "missing layers.0.self_attn.k_norm.weight, ",
        "taps in another order": "eagle_aux_hidden_state_layer_ids [1, 0, 5] ",
        "a tap twice": "eagle_aux_hidden_state_layer_ids [1, 1, 5] ",
        "a negative tap": "eagle_aux_hidden_state_layer_ids [-1, 1, 5] ",
        "features of two blocks": "the target gives 64 numbers a token, the drafter reads 96;",
    }
    for name, message in messages.items():
        if name in words:
            assert words[name] in message and f"/{name}: " in message and "\n" not in message
        else:
            assert message == ""


def test_only_the_targets_own_embedding_is_reported(refusals):
    """A table equal to the target's may be right, where the backbone is the target's: a warning, and it is kept."""
    _, log, found = refusals
    warnings = [line for line in log.splitlines() if "bit for bit" in line]
    assert len(warnings) == 1 and "/the target's embedding: its embedding is the target's" in warnings[0]
    sound, same = found[0], found[-1]
    assert np.array_equal(sound["logits"], same["logits"]), "the table that was offered took the place of its own"
