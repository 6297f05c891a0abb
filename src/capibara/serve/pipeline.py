"""A pipeline to call with prompts: an engine on a thread of its own, that keeps to a latency."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import queue
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from capibara.errors import CapibaraError, rule_error
from capibara.serve.config import EngineConfig
from capibara.serve.engine import Engine, EngineStats
from capibara.serve.latency import LatencyController, LatencyReport, TpuInferenceOptimizer, choose_steps
from capibara.serve.request import QueueFull, Request, RequestOutput, SamplingParams

if TYPE_CHECKING:
    from capibara.models.modular import ModularCapibaraModel

__all__ = ["InferencePipeline", "create_inference_pipeline"]

Prompt: TypeAlias = str | Sequence[int]
_Deliver: TypeAlias = Callable[[RequestOutput | BaseException], None]


class InferencePipeline:
    """Called with prompts it gives their continuations; any number of threads and tasks may call at once.

    All prompts that are there at a time share the engine's steps, whoever asked. Close it, or use it in a `with`.

    >>> from capibara.models import ModularCapibaraModel, load_preset
    >>> model = ModularCapibaraModel(load_preset("dev").model, precision="float32")
    >>> optimizer = TpuInferenceOptimizer(target_latency_ms=None)
    >>> with create_inference_pipeline(model, optimizer, max_batch_size=2, max_sequence_length=64) as pipeline:
    ...     answers = pipeline(["a", "b", "c"], max_tokens=3, temperature=0)
    >>> len(answers)
    3
    """

    def __init__(self, engine: Engine, controller: LatencyController) -> None:
        self.engine = engine
        self.controller = controller
        self._numbers = itertools.count()
        self._inbox: queue.SimpleQueue[tuple[str, Any, Any]] = queue.SimpleQueue()
        self._closed = False
        self._open = threading.Lock()
        """Held to ask, and to close: what is asked is either read by the engine's thread or refused."""
        self._thread = threading.Thread(target=self._drive, name="capibara-pipeline", daemon=True)
        self._thread.start()

    # Asking.

    def __call__(self, prompts: Prompt | Sequence[Prompt], **sampling: Any) -> Any:
        """The continuation of each prompt: text for text, ids for ids, a list for a list of prompts.

        Args:
          **sampling: what `SamplingParams` takes: max_tokens, temperature, stop, json_schema, ...
        """
        each, several = _as_list(prompts)
        parts: list[list[RequestOutput]] = [[] for _ in each]
        for number, output in self._outputs(each, sampling):
            parts[number].append(output)
        answers = [_whole(prompt, outputs) for prompt, outputs in zip(each, parts, strict=True)]
        return answers if several else answers[0]

    def stream(self, prompts: Prompt | Sequence[Prompt], **sampling: Any) -> Iterator[Any]:
        """New text, or new ids for a prompt of ids, as it comes; (number of the prompt, what is new) for a list.

        Leaving the iterator early cancels what is still running.
        """
        each, several = _as_list(prompts)
        for number, output in self._outputs(each, sampling):
            piece = _piece(each[number], output)
            if piece:
                yield (number, piece) if several else piece

    async def generate(self, prompts: Prompt | Sequence[Prompt], **sampling: Any) -> Any:
        """What a call gives, without blocking the event loop."""
        each, several = _as_list(prompts)
        parts: list[list[RequestOutput]] = [[] for _ in each]
        async for number, output in self._outputs_async(each, sampling):
            parts[number].append(output)
        answers = [_whole(prompt, outputs) for prompt, outputs in zip(each, parts, strict=True)]
        return answers if several else answers[0]

    async def stream_async(self, prompts: Prompt | Sequence[Prompt], **sampling: Any) -> AsyncIterator[Any]:
        """What `stream` gives, without blocking the event loop."""
        each, several = _as_list(prompts)
        async for number, output in self._outputs_async(each, sampling):
            piece = _piece(each[number], output)
            if piece:
                yield (number, piece) if several else piece

    def _outputs(self, prompts: Sequence[Prompt], sampling: dict[str, Any]) -> Iterator[tuple[int, RequestOutput]]:
        came: queue.SimpleQueue[tuple[int, RequestOutput | BaseException]] = queue.SimpleQueue()
        ids = self._ask(prompts, sampling, lambda number, item: came.put((number, item)))
        running = set(range(len(ids)))
        try:
            while running:
                number, item = came.get()
                if isinstance(item, BaseException):
                    raise item
                if item.finish_reason is not None:
                    running.discard(number)
                yield number, _sound(item)
        finally:
            for number in running:
                self._inbox.put(("cancel", ids[number], None))

    async def _outputs_async(
        self, prompts: Sequence[Prompt], sampling: dict[str, Any]
    ) -> AsyncIterator[tuple[int, RequestOutput]]:
        loop = asyncio.get_running_loop()
        came: asyncio.Queue[tuple[int, RequestOutput | BaseException]] = asyncio.Queue()

        def deliver(number: int, item: RequestOutput | BaseException) -> None:
            with contextlib.suppress(RuntimeError):  # the loop has ended, and nobody waits
                loop.call_soon_threadsafe(came.put_nowait, (number, item))

        ids = self._ask(prompts, sampling, deliver)
        running = set(range(len(ids)))
        try:
            while running:
                number, item = await came.get()
                if isinstance(item, BaseException):
                    raise item
                if item.finish_reason is not None:
                    running.discard(number)
                yield number, _sound(item)
        finally:
            for number in running:
                self._inbox.put(("cancel", ids[number], None))

    def _ask(
        self,
        prompts: Sequence[Prompt],
        sampling: dict[str, Any],
        deliver: Callable[[int, RequestOutput | BaseException], None],
    ) -> list[str]:
        asked = SamplingParams(**sampling)
        encode = self.engine.model.encode_prompt
        requests = [
            Request(f"{next(self._numbers)}", tuple(encode(prompt) if isinstance(prompt, str) else prompt), asked)
            for prompt in prompts
        ]
        with self._open:
            if self._closed:
                raise rule_error("A pipeline is asked while it is open", "a closed one", "create another")
            for number, request in enumerate(requests):
                self._inbox.put(("add", request, lambda item, number=number: deliver(number, item)))
        return [request.id for request in requests]

    # The engine's thread.

    def _drive(self) -> None:
        engine, controller = self.engine, self.controller
        waiting: deque[tuple[Request, _Deliver]] = deque()
        asked: dict[str, _Deliver] = {}
        try:
            while True:
                # Sleeps only where there is nothing to do.
                idle = not waiting and not engine.has_work()
                if not self._read(waiting, block=idle):
                    break
                self._add(waiting, asked)
                controller.adjust()
                outputs = engine.step()
                controller.saw(outputs, time.perf_counter())
                for output in outputs:
                    deliver = asked[output.id] if output.finish_reason is None else asked.pop(output.id)
                    deliver(output)
            stop: BaseException = RuntimeError("the pipeline was closed")
        except Exception as error:  # noqa: BLE001 - whoever waits for an answer is given it
            stop = error
        finally:
            with self._open:
                self._closed = True
                while not self._inbox.empty():  # what came after the word to close
                    kind, what, deliver = self._inbox.get()
                    if kind == "add":
                        waiting.append((what, deliver))
            for deliver in [*asked.values(), *(deliver for _, deliver in waiting)]:
                deliver(stop)
            engine.close()

    def _read(self, waiting: deque[tuple[Request, _Deliver]], *, block: bool) -> bool:
        """Take what was sent; False where the pipeline is to end."""
        while True:
            try:
                kind, what, deliver = self._inbox.get(block=block)
            except queue.Empty:
                return True
            block = False
            if kind == "close":
                return False
            if kind == "add":
                waiting.append((what, deliver))
            elif kind == "cancel" and not self.engine.cancel(what):
                for one in [one for one in waiting if one[0].id == what]:
                    waiting.remove(one)
            elif kind == "call":
                what()

    def _add(self, waiting: deque[tuple[Request, _Deliver]], asked: dict[str, _Deliver]) -> None:
        while waiting:
            request, deliver = waiting[0]
            try:
                self.engine.add(request)
            except QueueFull:  # they wait here: whoever called has them in memory anyway
                return
            except Exception as error:  # noqa: BLE001  # of one request: the others go on
                waiting.popleft()
                deliver(error)
            else:
                waiting.popleft()
                asked[request.id] = deliver

    # The rest.

    @property
    def latency(self) -> LatencyReport:
        """Whether the target can be kept, and how it stands."""
        return self.controller.report()

    @property
    def stats(self) -> EngineStats:
        return self.engine.stats()

    def close(self) -> None:
        """End what runs, and give the device's memory back."""
        self._inbox.put(("close", None, None))
        self._thread.join()

    def __enter__(self) -> InferencePipeline:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _as_list(prompts: Prompt | Sequence[Prompt]) -> tuple[list[Prompt], bool]:
    if isinstance(prompts, str):
        return [prompts], False
    if not _is_several(prompts):
        raise rule_error("A prompt is text or token ids, and several are a list", repr(prompts), "pass a list")
    if len(prompts) and not isinstance(prompts[0], str) and not _is_several(prompts[0]):
        return [prompts], False  # type: ignore[list-item]
    return list(prompts), True  # type: ignore[arg-type]


def _is_several(value: Any) -> bool:
    """Whether it is a list, or an array that is not a single number."""
    return isinstance(value, Sequence) or getattr(value, "ndim", 0) > 0


def _sound(output: RequestOutput) -> RequestOutput:
    """An answer that broke off is none: it would be taken for a whole one."""
    if output.finish_reason == "error" and output.rejected:
        raise ValueError(output.error)
    if output.finish_reason == "error":
        raise CapibaraError(f"The engine failed at a request: {output.error}")
    return output


def _piece(prompt: Prompt, output: RequestOutput) -> str | list[int]:
    return output.text if isinstance(prompt, str) else list(output.tokens)


def _whole(prompt: Prompt, outputs: Sequence[RequestOutput]) -> str | list[int]:
    if isinstance(prompt, str):
        return "".join(output.text for output in outputs)
    return [token for output in outputs for token in output.tokens]


def create_inference_pipeline(
    model: ModularCapibaraModel,
    optimizer: TpuInferenceOptimizer | None = None,
    max_batch_size: int = 64,
    max_sequence_length: int | None = None,
    *,
    cache_folder: str | Path | None = None,
    config: EngineConfig | None = None,
    progress: Callable[[int, int, str], None] | None = None,
) -> InferencePipeline:
    """A pipeline of this model. With a latency target every shape of steps is compiled and timed first.

    Args:
      max_batch_size: requests that run at a time at most.
      max_sequence_length: prompt and output of a request together; the model's context by default.
      cache_folder: where compiled programs are kept for the next start.
      config: all else that an engine can be told; the arguments here, and the optimizer, come before it.
      progress: called with how many programs are made, how many there are, and the name of the last one; with a target,
        without which each is made when it is first needed.
    """
    optimizer = optimizer or TpuInferenceOptimizer()
    if not isinstance(optimizer, TpuInferenceOptimizer):
        raise rule_error("optimizer is a TpuInferenceOptimizer", type(optimizer).__name__, "leave it out for none")
    base = config or EngineConfig(max_batch_tokens=max(max_batch_size, 2048))
    made = dataclasses.replace(
        base,
        max_sequences=max_batch_size,
        max_batch_tokens=max(base.max_batch_tokens, max_batch_size * (1 + base.speculative_tokens)),
        max_length=max_sequence_length or base.max_length,
        keep_keys=optimizer.use_kv_cache,
        attention=base.attention if optimizer.memory_efficient_attention else "reference",
        cache_folder=cache_folder or base.cache_folder,
    )
    engine = Engine(model, config=made)
    choose_steps(engine, optimizer.target_latency_ms)
    controller = LatencyController(engine, optimizer.target_latency_ms, choose_batch=optimizer.batch_size_optimizer)
    if optimizer.target_latency_ms is not None:
        engine.warm_up(progress)
        controller.calibrate()
    return InferencePipeline(engine, controller)
