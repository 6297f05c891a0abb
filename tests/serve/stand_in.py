"""An engine that says what its prompt tells it to, as fast as a test wants: for what a real one cannot be made to do.

A prompt that has `say[...]` in it is answered with what stands there, a byte a token; any other with itself.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from capibara.models.tokenizer import ByteTokenizer
from capibara.serve.link import ModelCard, ServerSettings, Stats
from capibara.serve.request import QueueFull, Request, RequestOutput, TokenLogprobs, Usage
from capibara.serve.server import Server

CARD = ModelCard(
    name="stand-in",
    origin="a test",
    created=1,
    tokenizer="bytes",
    max_length=4096,
    max_prompt=4095,
    vocab_size=259,
    prompt_bos=False,
    max_sequences=8,
    max_queue=8,
    adapters=("pirate",),
)


@dataclass
class _Running:
    request: Request
    left: list[int]
    text: Any
    said: int = 0
    cancelled: bool = False


@dataclass
class StandIn:
    """`step_s`: a step's time. `gate`: steps happen while it is set. `tokens_a_step`: of each request.

    A `regex` of "slow" or "slow and wrong" is read when `read` is set; one of "grows" is too large at its first token.
    """

    step_s: float = 0.0
    tokens_a_step: int = 1
    most: int = CARD.max_sequences + CARD.max_queue
    gate: threading.Event = field(default_factory=threading.Event)
    read: threading.Event = field(default_factory=threading.Event)
    seen: list[Request] = field(default_factory=list)
    cancelled: list[str] = field(default_factory=list)
    running: dict[str, _Running] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.gate.set()

    def add(self, request: Request, *, taken: bool = False) -> None:
        if len(self.running) >= self.most and not taken:
            raise QueueFull("The queue is full. Got one more. Fix: come again later.")
        if request.sampling.json_schema == {"type": "nonsense"}:
            raise ValueError("A schema is one that llguidance reads. Got nonsense. Fix: mend it.")
        if request.sampling.regex == "a fault":
            raise RecursionError("a fault of ours")
        self.seen.append(request)
        if b"fail[" in bytes(token for token in request.prompt if token < 256):
            self.running[request.id] = _Running(request, [], None)
            return
        tokenizer = ByteTokenizer()
        text = tokenizer.decode(request.prompt)
        told = re.findall(r"say\[(.*?)\]yas", text, re.DOTALL)
        left = tokenizer.encode(told[-1]) if told else list(request.prompt)
        self.running[request.id] = _Running(request, left, tokenizer.stream())

    def cancel(self, id: str) -> bool:
        if id in self.running:
            self.cancelled.append(id)
            self.running[id].cancelled = True
        return id in self.running

    def compiling(self, id: str) -> bool:
        one = self.running.get(id)
        return one is not None and self._unread(one)

    def _unread(self, one: _Running) -> bool:
        return str(one.request.sampling.regex).startswith("slow") and not self.read.is_set()

    def has_work(self) -> bool:
        return bool(self.running) and (self.gate.is_set() or any(one.cancelled for one in self.running.values()))

    def step(self) -> list[RequestOutput]:
        time.sleep(self.step_s)
        outputs = [self._advance(one) for one in list(self.running.values())]
        return [output for output in outputs if output is not None]

    def _advance(self, one: _Running) -> RequestOutput | None:
        sampling = one.request.sampling
        reason: Any = None
        fresh: list[int] = []
        if one.text is None:
            del self.running[one.request.id]
            usage = Usage(len(one.request.prompt), 0, 0)
            return RequestOutput(one.request.id, (), "", usage, None, "error", None, "The device did not like it.")
        if one.cancelled:
            reason = "cancelled"
        elif self._unread(one):
            return None
        elif sampling.regex in ("slow and wrong", "grows"):
            del self.running[one.request.id]
            usage = Usage(len(one.request.prompt), 0, 0)
            why = "A grammar is one that llguidance takes. Got something else. Fix: simplify it."
            return RequestOutput(one.request.id, (), "", usage, None, "error", None, why, rejected=True)
        elif not self.gate.is_set():
            return None
        else:
            fresh, one.left = one.left[: self.tokens_a_step], one.left[self.tokens_a_step :]
            fresh = fresh[: sampling.max_tokens - one.said]
            one.said += len(fresh)
            reason = "stop" if not one.left else "length" if one.said >= sampling.max_tokens else None
        text = "".join(one.text.put(token) for token in fresh) + (one.text.end() if reason else "")
        if reason:
            del self.running[one.request.id]
        logprobs = None
        if sampling.logprobs is not None:
            top = tuple((token, -1.0 - token) for token in range(sampling.logprobs))
            logprobs = tuple(TokenLogprobs(token, -0.5, top) for token in fresh)
        usage = Usage(len(one.request.prompt), one.said, 0)
        return RequestOutput(one.request.id, tuple(fresh), text, usage, logprobs, reason, waited_s=0.0)

    def stats(self) -> Any:
        values: dict[str, Any] = dict.fromkeys(Stats.__struct_fields__, 0) | {
            "running": len(self.running),
            "kv_cache_usage": 0.25,
        }
        return SimpleNamespace(**values)

    @property
    def compilations(self) -> int:
        return 0

    def close(self) -> None:
        self.running.clear()


@contextmanager
def served(engine: StandIn | None = None, card: ModelCard = CARD, **settings: Any) -> Iterator[tuple[Server, StandIn]]:
    """A server on a free port, its engine in a thread of this process."""
    engine = engine or StandIn()
    server = Server("127.0.0.1", 0, ServerSettings(**{"log_level": "warning", **settings}))
    up = threading.Event()
    loaded: Any = (engine, card, None)
    failures: list[BaseException] = []

    def run() -> None:
        try:
            server.run(lambda: loaded, lambda card: up.set())
        except BaseException as error:  # noqa: BLE001  # shown by the test, not by the thread
            failures.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        assert up.wait(120)
        wait_until_ready(server.address)
        yield server, engine
    finally:
        engine.gate.set()
        server.stop()
        thread.join(120)
        assert not thread.is_alive()
    assert not failures, failures
    assert server.process.returncode == 0
    assert not engine.running


def wait_until_ready(address: str, seconds: float = 60) -> None:
    import urllib.error
    import urllib.request

    deadline = time.monotonic() + seconds
    while True:
        try:
            with urllib.request.urlopen(f"{address}/ready", timeout=5) as answer:
                assert answer.status == 200
                return
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            assert time.monotonic() < deadline, "not ready in time"
            time.sleep(0.02)
