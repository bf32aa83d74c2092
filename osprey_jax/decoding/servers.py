"""Dialogues answered by OpenAI-compatible servers (SGLang): what they serve, and the loop in which they are asked."""

import asyncio
import time

from osprey_jax.command import UserError, run_async
from osprey_jax.config import RegenerateConfig
from osprey_jax.data.rendering import ChatTemplate
from osprey_jax.data.tokenizer import TOKENIZER_FILES, load_tokenizer
from osprey_jax.decoding import endpoint
from osprey_jax.decoding.chat import Chat
from osprey_jax.decoding.dialogues import Dialogue
from osprey_jax.decoding.endpoint import Card, Endpoint, jittered
from osprey_jax.decoding.pool import Pool, say
from osprey_jax.decoding.sink import Sink
from osprey_jax.files import fingerprint, read_json


class Source:
    """The model of `config.servers`; of `config.target`, the tokenizer and the chat template."""

    def __init__(self, config: RegenerateConfig):
        """Waits until a server answers. Raises `UserError`: none does, their models differ, unusable tokenizer."""
        self._config = config
        tokenizer = load_tokenizer(config.target)
        template = ChatTemplate(tokenizer, config.template_options)
        self._card = run_async(_discover(config))
        context = self._card.context or read_json(config.target / "config.json").get("max_position_embeddings")
        if type(context) is not int:
            raise UserError(f"{config.target}: neither its config nor the servers tell the length of the context")
        self._chat = Chat(tokenizer, template, context)
        files = [config.target / name for name in TOKENIZER_FILES if (config.target / name).is_file()]
        self.facts = {"target": fingerprint(*files), "model": self._card.model}

    def answer(self, dialogues: list[Dialogue], sink: Sink) -> None:
        """Empties `dialogues`. Raises `UserError`: no server for too long, or all requests are refused."""
        run_async(Pool(self._config, self._chat, self._card).answer(dialogues, sink))


async def _discover(config: RegenerateConfig) -> Card:
    """The model of the servers, and the smallest of their contexts."""
    endpoints = [Endpoint(url, config.timeout) for url in config.servers]
    until, delay = time.monotonic() + endpoint.PATIENCE_S, endpoint.FIRST_DELAY_S
    try:
        while True:
            results = await asyncio.gather(*(one.card_or_fault() for one in endpoints))
            found = {one.url: card for one, card in zip(endpoints, results, strict=True) if isinstance(card, Card)}
            if found:
                break
            reasons = "; ".join(f"{one.url}: {fault}" for one, fault in zip(endpoints, results, strict=True))
            if time.monotonic() > until:
                raise UserError(f"no server answers ({reasons})")
            if delay == endpoint.FIRST_DELAY_S:
                say(f"waiting for a server ({reasons})")
            await asyncio.sleep(jittered(delay))
            delay = min(2 * delay, endpoint.LONGEST_DELAY_S)
    finally:
        for one in endpoints:
            await one.close()
    if len({card.model for card in found.values()}) > 1:
        models = ", ".join(f"{url}: {card.model}" for url, card in found.items())
        raise UserError(f"the servers have different models ({models}); sglang has --served-model-name")
    contexts = [card.context for card in found.values() if card.context is not None]
    return Card(next(iter(found.values())).model, min(contexts, default=None))
