"""The mesh and where parameters lie on it."""

import dataclasses

import jax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec

from osprey_jax.command import UserError
from osprey_jax.config import Mesh
from osprey_jax.models import hf, hf_config
from osprey_jax.training.mesh import SHARDED, check_splits, layout, make_mesh, parameter_shardings
from tests.conftest import GOLDEN

P = PartitionSpec


class FakeMesh:
    """What is asked of a mesh of devices that this machine lacks."""

    def __init__(self, data: int, tensor: int):
        self.shape, self.size = {"data": data, "tensor": tensor}, data * tensor


def specs(model, mesh, monkeypatch, trained: bool) -> dict[str, PartitionSpec]:
    monkeypatch.setattr("osprey_jax.training.mesh.NamedSharding", lambda mesh, spec: spec)
    shardings = parameter_shardings(nnx.state(model), mesh, trained=trained)
    return {".".join(map(str, path)): spec.get_value() for path, spec in nnx.to_flat_state(shardings)}


def test_a_trained_model_is_split_along_its_first_dividing_dimension(monkeypatch):
    """Rows that lie together in memory, stacked or not; norms whole; another dimension where the first does not do."""
    drafter = hf.abstract_drafter(hf_config.drafter_config(GOLDEN / "qwen3" / "expected" / "converted"))
    vocabulary, width = drafter.lm_head.weight.shape
    found = specs(drafter, FakeMesh(2, 4), monkeypatch, trained=True)
    assert vocabulary % 8 == 0
    assert found["lm_head.weight"] == found["embed_tokens.weight"] == P(SHARDED)
    assert found["layers.0.self_attn.q_proj.weight"] == P(SHARDED)
    assert found["norm.weight"] == found["layers.0.self_attn.q_norm.weight"] == P()
    odd = next(n for n in range(2, 100) if vocabulary % n and width % n == 0)
    assert specs(drafter, FakeMesh(odd, 1), monkeypatch, trained=True)["lm_head.weight"] == P(None, SHARDED)
    assert specs(drafter, FakeMesh(1009, 1), monkeypatch, trained=True)["lm_head.weight"] == P()
    backbone = hf.abstract_causal_lm(hf_config.transformer_config(GOLDEN / "qwen3" / "target"))
    found = specs(backbone, FakeMesh(2, 4), monkeypatch, trained=True)
    assert found["layers.self_attn.o_proj.weight"] == P(None, SHARDED)
    assert found["layers.input_layernorm.weight"] == P()


def test_a_frozen_model_is_tensor_parallel(monkeypatch):
    """Heads, inner width and vocabulary over `tensor`, whichever side of a product they are on."""
    target = hf.abstract_causal_lm(hf_config.transformer_config(GOLDEN / "qwen3" / "target"))
    found = specs(target, FakeMesh(1, 2), monkeypatch, trained=False)
    assert found["layers.self_attn.q_proj.weight"] == P(None, "tensor", None)
    assert found["layers.self_attn.o_proj.weight"] == P(None, None, "tensor")
    assert found["layers.mlp.down_proj.weight"] == P(None, None, "tensor")
    assert found["embed_tokens.weight"] == found["lm_head.weight"] == P("tensor", None)
    assert not any(found["layers.input_layernorm.weight"])


def test_a_target_that_tensor_does_not_divide_is_refused():
    """By name: half a head on a device would be another model."""
    config = hf_config.transformer_config(GOLDEN / "qwen3" / "target")
    check_splits(config, FakeMesh(1, 2), "a target")
    with pytest.raises(UserError, match=r"mesh\.tensor 4 does not divide num_key_value_heads 2 of a target"):
        check_splits(config, FakeMesh(1, 4), "a target")
    with pytest.raises(UserError, match="vocab_size 457"):
        check_splits(dataclasses.replace(config, vocab_size=457), FakeMesh(1, 2), "a target")


@pytest.mark.parametrize(
    ("mesh", "rows", "message"),
    [
        (Mesh(tensor=3), 8, r"mesh\.tensor 3 does not divide the 4 device"),
        (Mesh(data=3), 8, "data 3 x tensor 1 is not the 4 device"),
        (Mesh(tensor=2), 6, "6 rows, which 4 devices do not divide"),
    ],
)
def test_a_mesh_that_does_not_fit_is_refused(mesh, rows, message):
    with pytest.raises(UserError, match=message):
        make_mesh(mesh, rows, devices=[jax.devices()[0]] * 4)


def test_layout_of_one_device_has_no_tensor_axis():
    """Nothing is gathered over an axis of one device."""
    mesh = make_mesh(Mesh(), rows=jax.device_count())
    model = hf.abstract_causal_lm(hf_config.transformer_config(GOLDEN / "qwen3" / "target"))
    found = layout(parameter_shardings(nnx.state(model), mesh, trained=True), mesh)
    assert found.tensor_axis is None
    assert found.spec(("norm", "weight")) == P()
