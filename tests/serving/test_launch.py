import json
import sys

import pytest

from osprey_jax.command import UserError
from osprey_jax.serving.launch import PATCHES, installed_version, plan_launch
from tests.conftest import GOLDEN
from tests.serving.fake_environment import fake_python

TARGET, DRAFT = GOLDEN / "qwen3/target", GOLDEN / "qwen3/expected/converted"


@pytest.fixture(autouse=True)
def _environment(monkeypatch):
    for name in ("PYTHONPATH", "SGLANG_EXTERNAL_MODEL_PACKAGE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def plan(tmp_path):
    def call(*arguments, target=TARGET, drafter=DRAFT, draft_steps=5):
        return plan_launch(
            target, drafter, python=fake_python(tmp_path), draft_steps=draft_steps, arguments=list(arguments)
        )

    return call


def flag(launch, name):
    at = launch.command.index(name)
    assert launch.command.count(name) == 1
    return launch.command[at + 1]


def test_a_drafter_is_served_by_chain_speculation(plan):
    """EAGLE-3, top-k 1, a token more than steps, the target's dtype, and our classes instead of SGLang's."""
    launch = plan(draft_steps=3)
    assert launch.command[1:3] == ["-m", "sglang.launch_server"]
    assert flag(launch, "--model-path") == str(TARGET)
    assert flag(launch, "--speculative-draft-model-path") == str(DRAFT)
    assert flag(launch, "--speculative-algorithm") == "EAGLE3"
    assert flag(launch, "--speculative-eagle-topk") == "1"
    assert (flag(launch, "--speculative-num-steps"), flag(launch, "--speculative-num-draft-tokens")) == ("3", "4")
    assert flag(launch, "--dtype") == "float32"
    assert launch.environment == {"PYTHONPATH": str(PATCHES), "SGLANG_EXTERNAL_MODEL_PACKAGE": "osprey_sgl_models"}
    assert (launch.url, launch.api_key) == ("http://127.0.0.1:30000", None)


def test_without_a_drafter_nothing_speculates(plan):
    launch = plan(drafter=None)
    assert not any("speculative" in item for item in launch.command) and launch.environment == {}


def test_flags_pass_through_and_rule(plan):
    """What the user says of the server is what it gets, in either notation, once."""
    launch = plan("--tp", "4", "--dtype=bfloat16", "--port", "8000", "--host", "0.0.0.0", "--api-key", "k")
    assert launch.command[-9:] == [
        "--tp",
        "4",
        "--dtype=bfloat16",
        "--port",
        "8000",
        "--host",
        "0.0.0.0",
        "--api-key",
        "k",
    ]
    assert "--dtype" not in launch.command and launch.command.count("--port") == 1
    assert (launch.url, launch.api_key) == ("http://127.0.0.1:8000", "k")
    launch = plan("--speculative-num-steps", "7")
    assert flag(launch, "--speculative-num-steps") == "7" and flag(launch, "--speculative-num-draft-tokens") == "8"


def test_a_quantized_target_leaves_the_drafter_as_it_is(plan):
    """SGLang would quantize it too."""
    assert flag(plan("--quantization", "fp8"), "--speculative-draft-model-quantization") == "unquant"
    chosen = plan("--quantization", "fp8", "--speculative-draft-model-quantization", "fp8")
    assert flag(chosen, "--speculative-draft-model-quantization") == "fp8"


def test_what_is_in_the_environment_stays(plan, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "/a:/b")
    assert plan().environment["PYTHONPATH"] == f"{PATCHES}:/a:/b"
    monkeypatch.setenv("SGLANG_EXTERNAL_MODEL_PACKAGE", "other")
    with pytest.raises(UserError, match="is other, and SGLang takes one such package"):
        plan()


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--model-path", "x"], "--model-path: is set here"),
        (["--speculative-eagle-topk=4"], "--speculative-eagle-topk: is set here"),
        (["--speculative-num-draft-tokens", "8"], "a chain of 5 steps has 6 tokens"),
        (["--speculative-num-steps", "many"], "'many' is no whole number above 0"),
        (["--port"], "'' is no whole number above 0"),
        (["--context-length", "4096"], "max_position_embeddings is 512, and the target is served with 4096"),
    ],
)
def test_contradicting_flags(plan, arguments, message):
    with pytest.raises(UserError, match=message):
        plan(*arguments)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"vocab_size": 7}, "vocab_size is 7, the target's vocab_size 456"),
        ({"target_hidden_size": 7}, "target_hidden_size is 7, the target's hidden_size"),
        ({"architectures": ["Qwen3ForCausalLM"]}, "'Qwen3ForCausalLM' is no EAGLE-3 drafter's"),
        ({"max_position_embeddings": 64}, "give --context-length 64"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 99]}}, r"tap layers \[1, 3, 99\]"),
    ],
)
def test_a_drafter_that_does_not_fit(plan, tmp_path, changes, message):
    """Said at once, not after the target is loaded."""
    drafter = tmp_path / "drafter"
    drafter.mkdir()
    config = json.loads((DRAFT / "config.json").read_text())
    (drafter / "config.json").write_text(json.dumps(config | changes))
    with pytest.raises(UserError, match=message):
        plan(drafter=drafter)


def test_others_drafters_are_served_too(plan, tmp_path):
    """Their configs lack our keys."""
    drafter = tmp_path / "drafter"
    drafter.mkdir()
    (drafter / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLMEagle3"]}))
    assert flag(plan(drafter=drafter), "--speculative-draft-model-path") == str(drafter)


def test_versions(tmp_path):
    """Another version's classes are not those that the package replaces."""
    assert installed_version(fake_python(tmp_path)) == "0.5.23"
    assert installed_version(fake_python(tmp_path, version="0.5.9")) == "0.5.9"
    with pytest.raises(UserError, match=r"has SGLang 0\.6\.0; supported are 0\.5\.23 and 0\.5\.9"):
        installed_version(fake_python(tmp_path, version="0.6.0"))
    with pytest.raises(UserError, match="has no SGLang"):
        installed_version(fake_python(tmp_path, version="none"))
    with pytest.raises(UserError, match="cannot be run"):
        installed_version(tmp_path / "nothing")
    with pytest.raises(UserError, match="has no SGLang"):
        installed_version(sys.executable)  # whose environment is not SGLang's


def test_the_command_is_one_to_paste(plan):
    launch = plan("--served-model-name", "a b")
    assert str(launch).startswith(f"PYTHONPATH={PATCHES} SGLANG_EXTERNAL_MODEL_PACKAGE=osprey_sgl_models ")
    assert str(launch).endswith("--served-model-name 'a b'")
