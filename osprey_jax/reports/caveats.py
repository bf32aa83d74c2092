"""What a decision's numbers cannot say, as far as the program can see it."""

from typing import Any

from osprey_jax.config import OFF
from osprey_jax.reports.statistics import FEW
from osprey_jax.reports.wording import number, share

_LOADED = 0.9  # of the level of concurrency, under which it was not reached


def caveats(decision: dict[str, Any]) -> list[str]:
    """Sentences, those that hold for this measurement first."""
    return [*_of_this(decision), *_of_all(decision)]


def few_conversations(decision: dict[str, Any]) -> str:
    """The prompt sets that have too few, with how many; empty where none has."""
    return ", ".join(
        f"{part['prompts']} {part['conversations']}" for part in decision["slices"] if part["conversations"] < FEW
    )


def _of_this(decision: dict[str, Any]) -> list[str]:
    found = []
    hardware = decision["measured"]["hardware"] or {}
    told = hardware.get("servers", {})
    arms = [decision["off"], *decision["drafters"]]
    if hardware.get("device") == "cpu":
        found.append(
            "It was measured on a CPU. On GPUs the times of target and drafter stand in another ratio: neither costs "
            "nor savings carry over, only accepted lengths do."
        )
    elif hardware.get("gpus") not in (None, decision["gpus"]):
        found.append(f"The server said {hardware['gpus']} GPU(s), the costs say {decision['gpus']}.")
    if few := few_conversations(decision):
        found.append(f"Few conversations ({few}): of fewer than {FEW}, intervals are narrower than they should be.")
    if left := [part for part in decision["slices"] if part["left_out"]]:
        listed = ", ".join(f"{part['prompts']} {part['left_out']}" for part in left)
        found.append(f"Conversations that some arm was never asked are left out everywhere: {listed}.")
    if differ := sorted(
        key
        for key in {key for facts in told.values() for key in facts}
        if not key.startswith("speculative") and len({str(facts.get(key)) for facts in told.values()}) > 1
    ):
        found.append(f"The arms' servers differ in more than speculation: {', '.join(differ)}.")
    level = decision["level"]
    if idle := [
        f"{arm['arm']} on {name} {running:.1f}"
        for arm in arms
        for name, running in arm["running"].items()
        if running is not None and running < _LOADED * level
    ]:
        found.append(f"Fewer than {level} requests ran at one time, on average: {', '.join(idle)}. More prompts help.")
    others = [str(other) for other in decision["levels"] if other != level]
    measured = f"({', '.join(others)} measured too: decide at each)" if others else "(the only one measured)"
    found.append(f"It holds at level {level} of concurrency {measured}: as a rule, more load leaves less to save.")
    if cut := [f"{arm['arm']} {number(count)}" for arm in arms if (count := arm["counts"]["ended_by_limit"])]:
        found.append(f"Answers cut by the limit of tokens, which count as successes: {', '.join(cut)}.")
    if whole := [arm for arm in arms if arm["counts"]["successes"] == arm["counts"]["asked"]]:
        unseen = whole[0]["failures"]["interval"]
        names = ", ".join(arm["arm"] for arm in whole)
        hidden = "" if unseen is None else f": up to {share(unseen[1])} could be, unseen by this sample"
        found.append(f"No request was without success with {names}{hidden}.")
    if any(arm["counts"]["equal"] < arm["counts"]["compared"] for arm in decision["drafters"]):
        found.append(
            f"A text that differs from that of {OFF} is another one, not a worse one; that two runs of {OFF} would "
            "agree was not measured."
        )
    return found


def _of_all(decision: dict[str, Any]) -> list[str]:
    return [
        "Decoding was greedy: with sampled answers, as a rule, fewer drafts are accepted.",
        "Each prompt was asked once of each arm. The intervals say how prompts differ, not how another day, machine or "
        "version of the server would.",
        "That the traffic to come is like these prompts is an assumption; so is that all arms leave the same share of "
        f"the GPU hours idle ({share(decision['costs']['idle_share'])}), that is, that GPUs which a faster arm frees "
        "are given back or serve others.",
        "The memory that a drafter takes leaves less for requests at one time; at a fixed level that does not show.",
    ]
