"""Run by SGLang's Python: prints {case: [a word that the refusal must hold, the refusal or ""]}."""

import json
import types

import torch
from osprey_sgl_models.checkpoint import check_config, load_checkpoint
from torch import nn

VOCAB, DRAFT = 6, 4


def config(eagle=(), **changes):
    values = {
        "_name_or_path": "somewhere",
        "attention_bias": False,
        "draft_vocab_size": DRAFT,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2], "use_aux_hidden_state": True} | dict(eagle),
        "head_dim": 2,
        "hidden_act": "silu",
        "num_hidden_layers": 2,
        "target_hidden_size": 3,
        "tie_word_embeddings": False,
        "vocab_size": VOCAB,
    }
    return types.SimpleNamespace(**values | changes)


class Model(nn.Module):
    """Two parameters, of which one holds three tensors."""

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.model = nn.Module()
        self.model.fc = nn.Linear(3, 2, bias=False)
        layer = nn.Module()
        layer.qkv_proj = nn.Linear(2, 6, bias=False)
        layer.qkv_proj.weight.weight_loader = self.load_part
        self.model.layers = nn.ModuleList([layer])

    def load_part(self, parameter, tensor, part):
        row = 2 * "qkv".index(part)
        parameter.data[row : row + 2] = tensor


def tensors(**changes):
    ids = torch.tensor([0, 2, 3, 5])
    among = torch.zeros(VOCAB, dtype=torch.bool)
    among[ids] = True
    values = {
        "fc.weight": torch.ones(2, 3),
        **{f"layers.0.{part}_proj.weight": torch.full((2, 2), float(i)) for i, part in enumerate("qkv")},
        "d2t": ids - torch.arange(DRAFT),
        "t2d": among,
    }
    return {name: value for name, value in (values | changes).items() if value is not None}


def refusal(call) -> str:
    try:
        call()
    except ValueError as error:
        return str(error)
    return ""


def load(**changes):
    model = Model(config())
    ids = load_checkpoint(model, tensors(**changes).items(), optional=set())
    assert ids.tolist() == [0, 2, 3, 5]
    assert model.model.fc.weight.eq(1).all()
    assert model.model.layers[0].qkv_proj.weight[:, 0].tolist() == [0, 0, 1, 1, 2, 2]


CONFIGS = {
    "osprey_layout": {"osprey_layout": 2},
    "eagle_aux_hidden_state_layer_ids [0, 2, 1]": {"eagle": {"eagle_aux_hidden_state_layer_ids": [0, 2, 1]}},
    "norm_before_fc": {"norm_before_fc": True},
    "norm_before_fc in eagle_config": {"eagle": {"norm_before_fc": True}},
    "fc_norm": {"fc_norm": True},
    "use_aux_norm": {"use_aux_norm": True},
    "norm_output": {"norm_output": True},
    "tie_word_embeddings": {"tie_word_embeddings": True},
    "bias": {"bias": True},
    "num_aux_hidden_states": {"num_aux_hidden_states": 4},
    "layer_ids": {"eagle": {"eagle_aux_hidden_state_layer_ids": [0, 1]}},
    "use_aux_hidden_state": {"eagle": {"use_aux_hidden_state": False}},
    "draft_vocab_size": {"draft_vocab_size": None},
    "hidden_act": {"hidden_act": "gelu"},
}
CHECKPOINTS = {
    "missing layers.0.k_proj.weight": {"layers.0.k_proj.weight": None},
    "missing d2t": {"d2t": None},
    "unexpected layers.0.k_proj.bias": {"layers.0.k_proj.bias": torch.ones(2)},
    "unexpected fc.scale": {"fc.scale": torch.ones(2)},
    "fc.weight has shape (2, 4)": {"fc.weight": torch.ones(2, 4)},
    "d2t (offsets": {"d2t": torch.tensor([0, 2, 3, 5])},
}

found = {"sound": ["", refusal(load)], "sound config": ["", refusal(lambda: check_config(config(osprey_layout=1)))]}
for word, changes in CONFIGS.items():
    found[word] = [word.split()[0], refusal(lambda changes=changes: check_config(config(**changes)))]
for word, changes in CHECKPOINTS.items():
    found[word] = [word, refusal(lambda changes=changes: load(**changes))]
print(json.dumps(found))
