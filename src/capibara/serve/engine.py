"""The engine: requests in, tokens out, all of them batched together step by step."""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from capibara.compile.warmup import WarmupReport
from capibara.errors import rule_error, unknown_name
from capibara.serve.config import EngineConfig
from capibara.serve.grammar import Grammar, Grammars
from capibara.serve.invariance import check_invariant, keeps_state
from capibara.serve.kv_cache import PagePool
from capibara.serve.request import FinishReason, Request, RequestOutput, TokenLogprobs, Usage
from capibara.serve.runner import SEVERAL_FORMS, Runner, Sent, form_of
from capibara.serve.sampling import FORMS, Form
from capibara.serve.scheduler import Chunk, Limits, Scheduler, Sequence, StepPlan
from capibara.serve.speculation import NgramDrafts
from capibara.serve.text import OutputText

if TYPE_CHECKING:
    from capibara.models.modular import ModularCapibaraModel
    from capibara.models.tokenizer import Tokenizer
    from capibara.serve.programs import Shape

__all__ = ["Engine", "EngineStats", "StepTime"]

_log = logging.getLogger(__name__)
_WAIT_S = 0.02
"""That a step waits for a grammar where there is nothing else to do: whoever drives the engine may have news."""


@dataclass(frozen=True)
class EngineStats:
    """What an engine has done, and what it is at."""

    running: int
    waiting: int
    """Those whose grammar is still being read included."""
    compiling: int
    """Requests whose grammar is still being read."""
    preemptions: int
    pages: int
    pages_used: int
    pages_cached: int
    """Pages that no request uses, whose keys may be used again."""
    kv_cache_usage: float
    """The share of pages in use."""
    prefix_queries: int
    """Prompt tokens that were looked for in the cache."""
    prefix_hits: int
    """Of them, those that were there."""
    prompt_tokens: int
    generation_tokens: int
    finished: Mapping[str, int]
    """Finish reason -> requests."""
    steps: int
    step_seconds: float
    """Of the last step, from one result to the next."""
    compilations: int
    drafted: int
    accepted: int


@dataclass(frozen=True)
class StepTime:
    """How long a step took, from the result before it to its own."""

    shape: Shape
    plan: StepPlan
    seconds: float


@dataclass
class _Progress:
    """What the engine keeps of a sequence beside its tokens."""

    text: OutputText
    stops: frozenset[int]
    """Tokens that end it."""
    eos: frozenset[int]
    grammar: Grammar | None = None
    drafts: NgramDrafts | None = None
    waited_s: float | None = None
    error: str | None = None
    rejected: bool = False
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    told: int = 0
    """Tokens of the answer that outputs have told of."""
    fresh: str = ""
    """Text, and log-probabilities, that none has told of yet."""
    logprobs: list[TokenLogprobs] = field(default_factory=list)


class Engine:
    """A model that serves many requests at once. One thread drives it.

    >>> from capibara.models import ModularCapibaraModel, load_preset
    >>> from capibara.serve.request import SamplingParams
    >>> model = ModularCapibaraModel(load_preset("dev").model, precision="float32")
    >>> engine = Engine(model, config=EngineConfig(max_sequences=2, max_batch_tokens=64, page_size=16, max_length=64))
    >>> engine.add(Request("a", (1, 2, 3), SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)))
    >>> outputs = []
    >>> while engine.has_work():
    ...     outputs += engine.step()
    >>> outputs[-1].finish_reason, outputs[-1].usage.completion_tokens
    ('length', 4)
    """

    def __init__(
        self,
        model: ModularCapibaraModel,
        *,
        config: EngineConfig | None = None,
        tokenizer: Tokenizer | None = None,
    ) -> None:
        self.model = model
        self.config = config = config or EngineConfig()
        self.tokenizer = tokenizer or model.tokenizer
        self.max_length = min(config.max_length or model.config.max_length, model.config.max_length)
        shares = config.prefix_sharing and config.keep_keys and not keeps_state(model)
        if config.speculative_tokens and keeps_state(model):
            raise rule_error(
                "Drafts are for models whose past can be taken back, of attention alone",
                "speculative_tokens of a model that keeps a state",
                "use speculative_tokens=0",
            )
        if config.batch_invariant:
            check_invariant(model, config)
        words = min(self.tokenizer.vocab_size, model.config.vocab)
        self.runner = Runner(model, config, max_length=self.max_length, words=words)
        self.cache_size = self.runner.cache_size
        """What fits, and why no more does."""
        _log.info("The engine has %s.", self.cache_size)
        pool = PagePool(self.cache_size.pages, config.page_size, sharing=shares)
        prefill = config.prefill_chunk or config.max_batch_tokens
        self.limits = Limits(config.max_sequences, config.max_batch_tokens, config.max_batch_tokens, prefill)
        self.scheduler = Scheduler(
            pool,
            self.limits,
            max_length=self.max_length,
            max_queue=config.max_queue,
            shares=shares,
            keeps=config.keep_keys,
            draft=self._draft if config.speculative_tokens else None,
        )
        self._grammars = Grammars(self.tokenizer)
        own = self.tokenizer.eos_id
        self.eos_ids = frozenset([*model.generation.eos_ids, *([] if own is None else [own])])
        """Tokens that end a request: the tokenizer's, and those of the model's generation_config.json."""
        # Rows of one shape only, or drafts between steps: each step is told by the host.
        self.decode_steps = 1 if config.batch_invariant or config.speculative_tokens else config.decode_steps
        """Tokens in a row that one program draws at most; 1 or the config's, and a controller may change it."""
        self.on_step: Callable[[StepTime], None] | None = None
        """Told of each step's time, where someone asks and it is known."""
        self._timing = True
        """Whether the last step was waited for: the next one's time is then its own."""
        self._seeds = np.random.default_rng(config.seed)
        self._sequences: dict[str, Sequence] = {}
        self._compiling: dict[str, tuple[Request, Future[Grammar]]] = {}
        self._unqueued: list[RequestOutput] = []
        """Last outputs of requests that ended before they were queued."""
        self._sent: deque[Sent] = deque()
        self._ended: list[Sequence] = []
        self._prompt_tokens = self._generation_tokens = self._steps = self._drafted = self._accepted = 0
        self._finished: Counter[str] = Counter()
        self._step_seconds = 0.0
        self._last_result = 0.0

    @property
    def max_prompt(self) -> int:
        """Tokens of the longest prompt: one is left to draw."""
        return self.max_length - 1

    @property
    def devices(self) -> list[Any]:
        """That it runs on."""
        return self.runner.devices

    @property
    def adapters(self) -> tuple[str, ...]:
        return tuple(self.config.adapters)

    # Requests.

    def add(self, request: Request, *, taken: bool = False) -> None:
        """Queue a request. A `ValueError` says what is wrong with it; `QueueFull` that too many wait.

        A grammar that was not met lately is read beside the steps, and its request is queued when that is done:
        `compiling` says whether it still is. One that cannot be read ends the request with an output that is
        `rejected`.

        Args:
          request: with an id of its own.
          taken: it was let in before, here or by another engine (`hand_back`), and is queued however many wait.
        """
        self._check(request)
        self.scheduler.check(request, beside=len(self._compiling), taken=taken)
        grammar = self._grammars.start(request.sampling) if request.sampling.constrained else None
        if isinstance(grammar, Future):
            self._compiling[request.id] = (request, grammar)
        else:
            self._queue(request, grammar)

    def compiling(self, id: str) -> bool:
        """Whether a request's grammar is still being read."""
        return id in self._compiling

    def _queue(self, request: Request, grammar: Grammar | None) -> None:
        asked = request.sampling
        sequence = self.scheduler.add(request, checked=True)
        seed = asked.seed if asked.seed is not None else int(self._seeds.integers(2**63))
        sequence.seed = seed
        sequence.one_by_one = form_of(asked) not in SEVERAL_FORMS
        eos = frozenset() if asked.ignore_eos else self.eos_ids
        text = OutputText(self.tokenizer, asked.stop, include_stop=asked.include_stop, spelled=asked.spelled_token_ids)
        progress = _Progress(text, eos | frozenset(asked.stop_token_ids), eos, grammar)
        # What may follow hangs on the last token: for a grammar, for a draft, and where all is computed anew.
        sequence.needs_host = grammar is not None or not self.config.keep_keys
        if self.config.speculative_tokens:
            sequence.needs_host = True
            if grammar is None and not asked.penalised:
                progress.drafts = NgramDrafts(self.config.speculative_ngram)
        sequence.state = progress
        self._sequences[request.id] = sequence

    def _queue_compiled(self) -> None:
        """Queue the requests whose grammar has been read, in the order of their arrival."""
        for id, (request, brought) in list(self._compiling.items()):
            if not brought.done():
                continue
            del self._compiling[id]
            error = brought.exception()
            if error is None:
                self._queue(request, brought.result())
                continue
            if not isinstance(error, ValueError):
                _log.error("the grammar of request %s cannot be read", id, exc_info=error)
            self._end_unqueued(request, "error", error=str(error), rejected=isinstance(error, ValueError))

    def _end_unqueued(self, request: Request, reason: FinishReason, **more: Any) -> None:
        self._finished[reason] += 1
        usage = Usage(len(request.prompt), 0, 0)
        self._unqueued.append(RequestOutput(request.id, (), "", usage, finish_reason=reason, **more))

    def _check(self, request: Request) -> None:
        vocab = self.model.config.vocab
        low, high = min(request.prompt), max(request.prompt)
        if low < 0 or high >= vocab:
            raise rule_error(f"Token ids are from 0 to {vocab - 1}", f"{low} to {high}", "use the model's tokenizer")
        if request.id in self._sequences or request.id in self._compiling:
            raise rule_error("A request's id is unlike that of any that is running", repr(request.id), "use another")
        adapter = request.sampling.adapter
        if adapter is not None and adapter not in self.config.adapters:
            raise unknown_name("adapter", adapter, self.config.adapters)

    def cancel(self, id: str) -> bool:
        """End a request; False where there is none of this id. The next step gives its last output."""
        if id in self._compiling:
            request, brought = self._compiling.pop(id)
            brought.cancel()
            self._end_unqueued(request, "cancelled")
            return True
        sequence = self._sequences.get(id)
        if sequence is None:
            return False
        self._finish(sequence, "cancelled")
        return True

    def hand_back(self) -> list[Request]:
        """Take out what has not begun, the oldest first, for another engine; what has begun goes on here."""
        unbegun = [sequence for sequence in self.scheduler.waiting if not sequence.admissions]
        for sequence in unbegun:
            self.scheduler.remove(sequence)
            del self._sequences[sequence.request.id]
        for _, brought in self._compiling.values():
            brought.cancel()
        reading = [request for request, _ in self._compiling.values()]
        self._compiling.clear()
        return sorted([*(sequence.request for sequence in unbegun), *reading], key=lambda request: request.arrival)

    def warm_up(
        self,
        progress: Callable[[int, int, str], None] | None = None,
        forms: Collection[Form] | None = None,
    ) -> WarmupReport:
        """Make every program that a step may need, so that none is compiled while requests wait.

        Args:
          progress: called with how many are done, how many there are, and the name of the last one done.
          forms: how tokens are drawn in the requests to come, such as ("greedy",), where that is known: programs of
            other forms are then made when a request asks for one.
        """
        unknown = set(forms or ()) - set(FORMS)
        if unknown:
            raise unknown_name("form of drawing", sorted(unknown)[0], FORMS)
        return self.runner.warm_up(progress, forms)

    def close(self) -> None:
        """End what runs, as cancelled, and give the device's memory back."""
        for id in [*self._sequences, *self._compiling]:
            self.cancel(id)
        self._grammars.close()
        self._sent.clear()
        self.runner.close()

    def has_work(self) -> bool:
        """Whether a step would do something."""
        return bool(self._sequences or self._sent or self._ended or self._compiling or self._unqueued)

    # The loop.

    def step(self) -> list[RequestOutput]:
        """Send the next step to the device, and give what the one before it brought; each request is in it once."""
        touched: dict[str, Sequence] = {}
        if self._compiling:
            if not self._sequences and not self._sent and not self._unqueued:  # else the loop would spin
                wait([brought for _, brought in self._compiling.values()], _WAIT_S, FIRST_COMPLETED)
            self._queue_compiled()
        # Who hangs on the last token would miss every other step if the next one were planned without it.
        if any(sequence.needs_host and sequence.in_flight for sequence in self.scheduler.running):
            while self._sent:
                self._receive(self._sent.popleft(), touched)
        plan = self.scheduler.plan(steps=self.decode_steps)
        if plan is not None:
            for sequence in plan.admitted:
                self._runs(sequence)
            self._sent.append(self.runner.send(plan, self._allowed(plan)))
        ahead = 1 if self.config.asynchronous and plan is not None else 0
        while len(self._sent) > ahead:
            self._receive(self._sent.popleft(), touched)
        for sequence in self._ended:
            touched[sequence.request.id] = sequence
        self._ended = []
        unqueued, self._unqueued = self._unqueued, []
        return [*unqueued, *(self._output(sequence) for sequence in touched.values())]

    def _runs(self, sequence: Sequence) -> None:
        progress: _Progress = sequence.state
        if progress.waited_s is None:  # else it was sent away, and is back
            progress.waited_s = max(0.0, time.monotonic() - sequence.request.arrival)

    def _draft(self, sequence: Sequence) -> tuple[int, ...]:
        progress: _Progress = sequence.state
        if progress.drafts is None:
            return ()
        return progress.drafts.guess(sequence.tokens, self.config.speculative_tokens)

    def _allowed(self, plan: StepPlan) -> np.ndarray | None:
        """The tokens that grammars allow after each chunk, a bit each; None where no request has one."""
        hosted = [(n, chunk) for n, chunk in enumerate(plan.chunks) if chunk.sequence.needs_host and chunk.samples]
        grammars = [(n, chunk.sequence.state.grammar) for n, chunk in hosted if chunk.sequence.state.grammar]
        if not grammars:
            return None
        allowed = np.full((len(plan.chunks), -(-self.model.config.vocab // 32)), 0xFFFFFFFF, np.uint32)
        for number, grammar in grammars:
            grammar.allow(allowed[number])
        return allowed

    def _receive(self, sent: Sent, touched: dict[str, Sequence]) -> None:
        draws = any(chunk.samples for chunk in sent.plan.chunks)
        if draws:
            for chunk, tokens, row in sent.drawn():
                sequence = chunk.sequence
                right = self._verified(chunk, tokens) if chunk.draft else 0
                if sequence.finished:
                    sequence.in_flight -= chunk.drawn
                    continue
                finish = self._read(sequence, tokens, row, sent)
                self.scheduler.take(sequence, tokens, drawn=chunk.drawn, extra=min(right, len(tokens)) if right else 0)
                if finish is None:
                    touched[sequence.request.id] = sequence
                else:
                    self._finish(sequence, finish)
        now = time.perf_counter()
        self._step_seconds = now - max(sent.at, self._last_result)
        self._last_result = now
        self._steps += 1
        # Pieces of prompts bring nothing to wait for: when they are done is not seen, and the next step ends later.
        if self.on_step is not None and not sent.compiled and draws and self._timing:
            self.on_step(StepTime(sent.shape, sent.plan, self._step_seconds))
        self._timing = draws

    def _verified(self, chunk: Chunk, tokens: list[int]) -> int:
        """How many drafted tokens were right; those drawn after a wrong one are cut off."""
        right = 0
        while right < len(chunk.draft) and chunk.draft[right] == tokens[right]:
            right += 1
        del tokens[right + 1 :]
        self._drafted += len(chunk.draft)
        self._accepted += right
        return right

    def _read(self, sequence: Sequence, tokens: list[int], row: int, sent: Sent) -> FinishReason | None:
        """Why the request ends, where it does; tokens after the one that ends it are cut off."""
        progress: _Progress = sequence.state
        asked, grammar, text = sequence.request.sampling, progress.grammar, progress.text
        for number, token in enumerate(tokens):
            if asked.logprobs is not None:
                self._add_logprobs(progress, asked.logprobs, token, row + number, sent)
            if grammar is not None and not grammar.take(token):
                grew = grammar.error
                progress.error, progress.rejected = grew or f"token {token} is not of the grammar", bool(grew)
                del tokens[number + 1 :]
                return "error"
            if token in progress.stops:
                progress.stop_reason = None if token in progress.eos else token
                del tokens[number + 1 :]
                return "stop"
            progress.fresh += text.put(token)
            if text.found is not None or (grammar is not None and grammar.complete):
                progress.stop_reason = text.found
                del tokens[number + 1 :]
                return "stop"
        return "length" if len(sequence.tokens) + len(tokens) >= sequence.last_token_number else None

    @staticmethod
    def _add_logprobs(progress: _Progress, count: int, token: int, row: int, sent: Sent) -> None:
        if sent.chances is not None:
            own, ids, top = sent.chances
            likeliest = zip(ids[row, :count].tolist(), top[row, :count].tolist(), strict=True)
            progress.logprobs.append(TokenLogprobs(token, float(own[row]), tuple(likeliest)))

    def _finish(self, sequence: Sequence, reason: FinishReason) -> None:
        progress: _Progress = sequence.state
        progress.finish_reason = reason
        self._finished[reason] += 1
        self.scheduler.remove(sequence)
        del self._sequences[sequence.request.id]
        self._ended.append(sequence)

    def _output(self, sequence: Sequence) -> RequestOutput:
        progress: _Progress = sequence.state
        request, prompt = sequence.request, sequence.prompt_length
        if progress.finish_reason is not None:
            progress.fresh += progress.text.end()
        tokens = tuple(sequence.tokens[prompt + progress.told :])
        text, progress.fresh = progress.fresh, ""
        chances = None
        if request.sampling.logprobs is not None:
            chances, progress.logprobs = tuple(progress.logprobs), []
        if tokens and not progress.told:
            self._prompt_tokens += prompt
        progress.told += len(tokens)
        self._generation_tokens += len(tokens)
        return RequestOutput(
            request.id,
            tokens,
            text,
            Usage(prompt, progress.told, sequence.cached_tokens),
            chances,
            progress.finish_reason,
            progress.stop_reason,
            progress.error,
            progress.rejected,
            progress.waited_s,
        )

    def stats(self) -> EngineStats:
        """Where it stands."""
        scheduler, pool = self.scheduler, self.scheduler.pool
        return EngineStats(
            running=len(scheduler.running),
            waiting=len(scheduler.waiting) + len(self._compiling),
            compiling=len(self._compiling),
            preemptions=scheduler.preemptions,
            pages=pool.pages,
            pages_used=pool.used,
            pages_cached=pool.idle,
            kv_cache_usage=pool.used / pool.pages,
            prefix_queries=scheduler.prefix_queries,
            prefix_hits=scheduler.prefix_hits,
            prompt_tokens=self._prompt_tokens,
            generation_tokens=self._generation_tokens,
            finished=MappingProxyType(dict(self._finished)),
            steps=self._steps,
            step_seconds=self._step_seconds,
            compilations=self.runner.compilations,
            drafted=self._drafted,
            accepted=self._accepted,
        )

    @property
    def compilations(self) -> int:
        """Programs that were compiled, and not there already or read from disk."""
        return self.runner.compilations

    def check(self) -> None:
        """Raise where the books of the cache are wrong; for tests and for a watchful server."""
        self.scheduler.pool.check(sequence.pages for sequence in self.scheduler.sequences())
