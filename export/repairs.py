"""Known faults that only numbers show: how the files would be served without each, and whether that mends them."""

import dataclasses

import numpy as np

from export.comparison import Agreement, Comparison, Replayed
from export.exported import Exported, Rope
from export.reference import Reference
from export.replay import Serving
from osprey_jax.models.drafter import default_tap_layers
from osprey_jax.models.transformer import TransformerConfig


@dataclasses.dataclass(frozen=True)
class Repair:
    """A fault, and how the files would be served without it."""

    fault: str
    serving: Serving
    certain: bool = False  # a fault whatever the numbers say: the files contradict what was trained


def as_served(exported: Exported, target: TransformerConfig) -> Serving:
    """What SGLang makes of the files for `target`."""
    return Serving(
        tap_layers=exported.tap_layers or default_tap_layers(target.num_layers),
        rope=exported.rope,
        swap=exported.swap_h_and_emb,
        target_embedding=not exported.swap_h_and_emb and exported.hidden_size == exported.target_hidden_size,
    )


def near(taps: tuple[int, ...], num_layers: int) -> list[tuple[int, ...]]:
    """`taps` and those one block off, as far as the target has them."""
    shifted = [tuple(i + off for i in taps) for off in (0, -1, 1)]
    return [layers for layers in shifted if within(layers, num_layers)]


def within(taps: tuple[int, ...], num_layers: int) -> bool:
    return len(taps) == 3 and all(0 <= i < num_layers for i in taps)


def find_repairs(
    exported: Exported, serving: Serving, target: TransformerConfig, target_rope: Rope, reference: Reference | None
) -> list[Repair]:
    """Each known fault that only numbers show, one at a time; first those that contradict the reference."""

    def changed(**changes) -> Serving:
        return dataclasses.replace(serving, **changes)

    other_swap = changed(
        swap=not serving.swap,
        target_embedding=serving.swap and exported.hidden_size == exported.target_hidden_size,
    )
    swap_fault = f"streams swapped: swap_h_and_emb is {_json(serving.swap)}, trained was {_json(not serving.swap)}"
    taps_now = f"eagle_aux_hidden_state_layer_ids are {list(serving.tap_layers)}"
    certain, guesses = [], []
    if reference is not None:
        facts = reference.facts
        taps, rope = tuple(facts["tap_layers"]), Rope(facts["rope_theta"], facts["rope_scaling"])
        if taps != serving.tap_layers:
            how = "off by one" if serving.tap_layers in near(taps, target.num_layers) else "wrong"
            certain.append((f"tap ids {how}: {taps_now}, trained were {list(taps)}", changed(tap_layers=taps)))
        if rope != serving.rope:
            how = "scaling lost" if serving.rope.scaling is None and rope.scaling is not None else "changed"
            fault = f"RoPE {how}: config.json says {serving.rope}, trained was {rope}"
            certain.append((fault, changed(rope=rope)))
        if facts["swap_h_and_emb"] != serving.swap:
            certain.append((swap_fault, other_swap))
    elif target_rope != serving.rope:
        fault = f"RoPE: config.json says {serving.rope}, the target has {target_rope}"
        guesses.append((fault, changed(rope=target_rope)))
    for layers in near(serving.tap_layers, target.num_layers)[1:]:
        guesses.append((f"tap ids off by one: {taps_now}, trained were {list(layers)}", changed(tap_layers=layers)))
    fault = "stream normed: training handed on the stream after the final norm, servers hand it on before"
    guesses += [(fault, changed(normed_stream=True)), (swap_fault, other_swap)]
    if exported.hidden_size == exported.target_hidden_size and "embed_tokens.weight" in exported.tensors:
        other = not serving.target_embedding
        tables = ("the target's", "embed_tokens.weight") if other else ("embed_tokens.weight", "the target's")
        fault = f"embedding: trained with {tables[0]}, served with {tables[1]}"
        guesses.append((fault, changed(target_embedding=other)))
    served = [repair for _, repair in certain]
    return [Repair(*item, certain=True) for item in certain] + [
        Repair(*item) for item in guesses if item[1] not in served
    ]


def explained(comparison: Comparison, agreement: Agreement, repairs: list[Repair]) -> list[str]:
    """Why replay and trainer differ: the repair under which they do not, else by how much."""
    healed = next((r for r in repairs if comparison.agreement(comparison.replay(r.serving)).holds), None)
    others = [repair.fault for repair in repairs if repair.certain and repair is not healed]
    if healed is not None:
        return [f"{healed.fault} (so repaired, the replay agrees with what was trained)", *others]
    wrong_K = (agreement.share_K < 1) | (agreement.relative_K > agreement.tolerance_K)
    step = int(np.argmax(wrong_K))
    return [
        *others,
        f"the replay differs from what was trained and no single known repair mends it: at step {step}, top-1 "
        f"agreement {agreement.share_K[step]:.1%}, largest logit difference {agreement.difference_K[step]:.3g}",
    ]


def better(comparison: Comparison, replayed: Replayed, repairs: list[Repair]) -> list[str]:
    """Without the trainer's word: repairs with which the target's choices are drafted clearly more often."""
    now, warnings = comparison.right(replayed).mean(), []
    margin = max(0.03, 3 * (0.5 / replayed.best_KxP.shape[1]) ** 0.5)
    for repair in repairs:
        then = comparison.right(comparison.replay(repair.serving)).mean()
        if then > now + margin:
            warnings.append(f"{repair.fault}? so served, {then:.1%} of drafts are the target's choices, not {now:.1%}")
    return warnings


def _json(value: bool) -> str:
    return "true" if value else "false"
