"""Dialogues answered by the target in this process, a batch at a time."""

import jax.numpy as jnp

from osprey_jax.config import RegenerateConfig
from osprey_jax.decoding.dialogues import Dialogue, Question, Unanswerable
from osprey_jax.decoding.generate import Sampling, generate
from osprey_jax.decoding.requests import Request, by_length
from osprey_jax.decoding.sink import Sink
from osprey_jax.decoding.target import open_target
from osprey_jax.files import fingerprint


class Source:
    """The target in `config.target`; its weights are read when there is something to answer."""

    def __init__(self, config: RegenerateConfig):
        """Raises `UserError` where the checkpoint is unusable, except for its weights."""
        self.config = config
        self.target = open_target(config.target, config.template_options)
        # A batch's size and the target's place on the disk change nothing but rounding.
        self.facts = {"target": fingerprint(config.target), "compute_dtype": config.compute_dtype}

    def answer(self, dialogues: list[Dialogue], sink: Sink) -> None:
        """Group by group, alike in length. Empties `dialogues`."""
        dialogues.sort(key=lambda dialogue: len(dialogue.turns))
        asked, lengths = [], []
        for dialogue in dialogues:
            if question := self._question(dialogue, sink):
                asked.append(dialogue)
                lengths.append(len(question.prompt))
        dialogues.clear()
        groups = [[asked[i] for i in group] for group in by_length(lengths, self.config.batch_size)]
        asked.clear()
        if groups:
            dtype = jnp.dtype(self.config.compute_dtype)
            model = self.target.load(dtype)
        groups.reverse()
        while groups:
            group = groups.pop()
            while group:
                group = self._turn(model, dtype, group, sink)

    def _turn(self, model, dtype, dialogues: list[Dialogue], sink: Sink) -> list[Dialogue]:
        """Answer the next turn of `dialogues`; those that go on."""
        asked = [(dialogue, self._question(dialogue, sink)) for dialogue in dialogues]
        asked = [(dialogue, question) for dialogue, question in asked if question]
        if not asked:
            return []
        completions = generate(
            model,
            [Request(question.prompt, question.limit, question.number, question.turn) for _, question in asked],
            stop_ids=self.target.stop_ids,
            sampling=Sampling(self.config.temperature, self.config.top_p, self.config.seed),
            rows=self.config.batch_size,
            dtype=dtype,
        )
        for (dialogue, question), completion in zip(asked, completions, strict=True):
            message = self.target.message(question.messages, self.target.text(completion.token_ids))
            dialogue.answer(question, message, completion.finish_reason)
            sink.tokens(len(completion.token_ids))
            if dialogue.complete:
                sink.finished(dialogue)
        return [dialogue for dialogue, _ in asked if not dialogue.complete]

    def _question(self, dialogue: Dialogue, sink: Sink) -> Question | None:
        try:
            return dialogue.question(self.target, self.config.max_new_tokens)
        except Unanswerable as reason:
            sink.finished(dialogue, str(reason))
            return None
