"""What the server's process has: its settings, the engine at the other end, and whether it takes requests."""

from __future__ import annotations

import asyncio

from capibara.errors import unknown_name
from capibara.models.tokenizer import load_tokenizer
from capibara.serve.http.engine_client import EngineClient
from capibara.serve.http.errors import ApiError, bad_request, overloaded, unavailable
from capibara.serve.http.metrics import Metrics
from capibara.serve.http.prompts import Prompts
from capibara.serve.link import FromEngine, ModelCard, ServerSettings

__all__ = ["Serving"]


class Serving:
    """One server. `engine` and `prompts` are there once the engine has told which model it runs."""

    def __init__(self, settings: ServerSettings, writer: asyncio.StreamWriter) -> None:
        self.settings = settings
        self.metrics = Metrics("")
        self.engine = EngineClient(writer, self.told, lambda timeline, output: self.metrics.output(timeline, output))
        self.draining = asyncio.Event()
        self._prompts: Prompts | None = None

    def told(self, message: FromEngine) -> None:
        if message.model is not None:
            self._start(message.model)
        if message.stats is not None:
            self.metrics.told(message.stats)
        if message.drain:
            self.draining.set()

    def _start(self, card: ModelCard) -> None:
        self.metrics = Metrics(card.name)
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
        if self.engine.in_flight + count > most:
            raise overloaded(
                f"The server answers {most} requests at a time, those that wait included. Got {count} more than "
                f"{self.engine.in_flight}. Fix: come again later.",
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
