"""What the server's process has: its settings, the engine at the other end, and whether it takes requests."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from capibara.errors import unknown_name
from capibara.models.tokenizer import load_tokenizer
from capibara.serve.http.engine_client import EngineClient
from capibara.serve.http.errors import ApiError, bad_request, overloaded, unavailable
from capibara.serve.http.metrics import Metrics
from capibara.serve.http.prompts import Prompts
from capibara.serve.link import FromEngine, ModelCard, ServerSettings

__all__ = ["Serving"]

Result = TypeVar("Result")
_PREPARING = min(4, os.cpu_count() or 1)
"""Threads that render and tokenize: more than a few only take turns, and the event loop has to have its own."""


class Serving:
    """One server. `engine` and `prompts` are there once the engine has told which model it runs."""

    def __init__(self, settings: ServerSettings, writer: asyncio.StreamWriter) -> None:
        self.settings = settings
        self.metrics = Metrics("")
        self.engine = EngineClient(writer, self.told, lambda timeline, output: self.metrics.output(timeline, output))
        self.draining = asyncio.Event()
        self.resizing = False
        """Whether the engine goes over to other devices. Requests wait meanwhile."""
        self._prompts: Prompts | None = None
        self._pool = ThreadPoolExecutor(_PREPARING, thread_name_prefix="prepare")
        self.preparing = 0
        """Requests whose prompts are being made into tokens, or wait for that."""

    async def prepare(self, count: int, work: Callable[[], Result]) -> Result:
        """What comes of `work`, in a thread, for so many requests. They count as being answered meanwhile: one too many
        is refused before anything is done for it, and what waits for a thread is bounded."""
        self.check_room(count)
        self.preparing += count
        try:
            return await asyncio.get_running_loop().run_in_executor(self._pool, work)
        finally:
            self.preparing -= count

    def told(self, message: FromEngine) -> None:
        if message.model is not None:
            self._start(message.model)
        if message.stats is not None:
            self.metrics.told(message.stats)
        if message.resizing is not None:
            self.resizing = message.resizing
        if message.drain:
            self.draining.set()

    def close(self) -> None:
        """End the threads and processes that prepare prompts."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        if self._prompts is not None:
            self._prompts.close()

    def _start(self, card: ModelCard) -> None:
        if self._prompts is not None:  # the same model on other devices
            self._prompts.card = card
            return
        self.metrics = Metrics(card.name, card.dollars_per_hour)
        self._prompts = Prompts(
            load_tokenizer(card.tokenizer),
            card,
            template=self.settings.chat_template,
            tool_parser=self.settings.tool_parser,
        )

    @property
    def ready(self) -> bool:
        return self._prompts is not None and not self.draining.is_set() and not self.engine.gone.is_set()

    @property
    def prompts(self) -> Prompts:
        self.check_ready()
        assert self._prompts is not None
        return self._prompts

    def check_ready(self) -> None:
        if self.draining.is_set():
            raise unavailable("The server stops, and takes no new requests.", "stopping")
        if self.engine.gone.is_set():
            raise unavailable("The engine has ended.", "engine_gone")
        if self._prompts is None:
            raise unavailable("The model is still being loaded.", "loading")

    def check_room(self, count: int) -> None:
        """Refuse what would wait too long: a queue that grows without end answers nobody in time."""
        card = self.prompts.card
        most = card.max_sequences + card.max_queue
        if count > most:
            raise bad_request(
                f"The server answers {most} requests at a time, those that wait included. Got {count} in one call: "
                f"prompts times n. Fix: ask for fewer.",
                "n",
            )
        here = self.engine.in_flight + self.preparing
        if here + count > most:
            raise overloaded(
                f"The server answers {most} requests at a time, those that wait included. Got {count} more than "
                f"{here}. Fix: come again later.",
                self.engine.retry_after_s(),
            )

    def names(self) -> list[str]:
        """What a request may call its model: the model itself, and its adapters."""
        return [self.prompts.card.name, *self.prompts.card.adapters]

    def adapter_of(self, model: str) -> str | None:
        """The adapter that a request's model is; None for the model as it is."""
        if model == self.prompts.card.name:
            return None
        if model not in self.prompts.card.adapters:
            raise ApiError(404, str(unknown_name("model", model, self.names())), param="model", code="model_not_found")
        return model
