"""Requests to a server as they would come, by chance or from so many people, and the records of them."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from capibara.errors import CapibaraError, rule_error, unknown_name
from capibara.serve.load.client import Address, Record, get_json, streamed_completion
from capibara.serve.load.trace import Lengths, fixed_trace, scaled

__all__ = ["Load", "Target", "find_target", "run_load"]

_COUNTS_TOKENS = ("capibara", "vllm")


@dataclass(frozen=True)
class Target:
    """A server's model, as its list of models tells of it."""

    address: Address
    model: str
    context: int
    vocab: int
    counts_tokens: bool
    """Whether its events can say how many tokens have come; without, an event counts as one."""


@dataclass(frozen=True)
class Load:
    """How much is asked: requests arrive by chance at a rate, or `users` ask one after the other."""

    requests: int
    rate: float | None = None
    """Requests a second, on the average of a Poisson process."""
    users: int | None = None
    seed: int = 0
    timeout_s: float = 600.0

    def __post_init__(self) -> None:
        if (self.rate is None) == (self.users is None):
            raise rule_error(
                "Requests arrive at a rate, or come from a number of users",
                f"rate = {self.rate}, users = {self.users}",
                "give one of the two",
            )
        if self.requests < 1 or (self.users is not None and self.users < 1):
            raise rule_error("There is a request and a user or more", f"{self.requests}, {self.users}", "ask for more")
        if self.rate is not None and not self.rate > 0:
            raise rule_error("A rate is above 0", self.rate, "give requests a second")


async def find_target(
    address: Address, model: str | None = None, context: int | None = None, vocab: int | None = None
) -> Target:
    """What is served at an address; what its list does not say must be given."""
    models = {entry["id"]: entry for entry in (await get_json(address, "/models"))["data"]}
    if not models:
        raise CapibaraError(f"{address} serves no model")
    name = model or next(iter(models))
    if name not in models:
        raise unknown_name("model", name, models)
    entry = models[name]
    length = context or entry.get("max_model_len")
    if length is None:
        raise rule_error(
            "The trace is scaled to a model's context", f"{name} at {address}, which does not tell it", "give --context"
        )
    words = vocab or entry.get("vocab_size") or 1000  # ids below it are in every vocabulary that people serve
    return Target(address, name, int(length), int(words), entry.get("owned_by") in _COUNTS_TOKENS)


async def run_load(
    target: Target, load: Load, progress: Callable[[int], None] | None = None
) -> tuple[list[Record], float]:
    """(the records, the time they were counted from). One request goes ahead and is not counted."""
    rng = random.Random(load.seed)
    trace = scaled(fixed_trace(), target.context)
    lengths = [trace[number % len(trace)] for number in range(load.requests)]
    bodies = [_body(target, one, rng) for one in lengths]
    first = Record(time.perf_counter())
    await streamed_completion(target.address, _body(target, Lengths(4, 2), rng), first)
    if not first.ok:
        raise CapibaraError(f"{target.address} answered a first request with {first.status}: {first.error}")
    done = 0

    async def one(body: dict[str, Any], record: Record) -> None:
        nonlocal done
        try:
            async with asyncio.timeout(load.timeout_s):
                await streamed_completion(target.address, body, record)
        except TimeoutError:
            record.error, record.ended = f"no end within {load.timeout_s:g} s", time.perf_counter()
        done += 1
        if progress is not None:
            progress(done)

    began = time.perf_counter()
    if load.rate is not None:
        return await _arriving(bodies, load.rate, rng, began, one), began
    assert load.users is not None
    return await _users(bodies, load.users, one), began


async def _arriving(bodies: Sequence[Any], rate: float, rng: random.Random, began: float, one: Any) -> list[Record]:
    """A request is sent when it is due, whatever became of those before it."""
    due, records, tasks = began, [], []
    for body in bodies:
        due += rng.expovariate(rate)
        await asyncio.sleep(max(due - time.perf_counter(), 0))
        records.append(Record(due))
        tasks.append(asyncio.create_task(one(body, records[-1])))
    await asyncio.gather(*tasks)
    return records


async def _users(bodies: Sequence[Any], users: int, one: Any) -> list[Record]:
    """Each user asks again when the last answer is there."""
    records: list[Record] = []
    left = iter(bodies)

    async def user() -> None:
        for body in left:
            record = Record(time.perf_counter())
            records.append(record)
            await one(body, record)

    await asyncio.gather(*(user() for _ in range(users)))
    return records


def _body(target: Target, lengths: Lengths, rng: random.Random) -> dict[str, Any]:
    # Ids and not text: so many tokens are so many, and no two prompts begin alike.
    prompt = [rng.randrange(target.vocab) for _ in range(lengths.prompt)]
    options: dict[str, Any] = {"include_usage": True}
    body: dict[str, Any] = {
        "model": target.model,
        "prompt": prompt,
        "max_tokens": lengths.output,
        "temperature": 0,
        "stream": True,
        "stream_options": options,
    }
    if target.counts_tokens:
        options["continuous_usage_stats"] = True
        body["ignore_eos"] = True
    return body
