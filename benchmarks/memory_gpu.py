"""Three times the memory limit, in one run on one device: within the limit, bit for bit, and how much prefetch hides.

    python benchmarks/memory_gpu.py --out memory.json                       # one H200: 48 GiB of tensors under 16 GiB
    python benchmarks/memory_gpu.py --tensor-mib 4 --limit-gib 0.0625 --repeats 2    # a CPU, in seconds

Tensors are drawn on the device from their number, registered with a `TpuMemoryManager`, and used one after the other,
round after round; each is compared with another draw of it, bit by bit, in a round of its own. A use is a chain of
products whose length is set by what a transfer takes on this machine: `--work` times as long.

What is hidden: the rounds without prefetch take the products and the transfers, those of one tensor that stays take the
products alone, and prefetch's rounds lie between the two: hidden = (without - with) / (without - products). The forms
take turns. The same is done for `HBMOptimizer.stream` of numpy arrays, "random" (nothing ahead) against "sequential"
with and without staging in pinned memory; with it, what the staging threads and the transfers reached is told: the one
that is slower than the products bounds what can be hidden.

On a GPU jax keeps at most 64 GB of pinned host memory, unless XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB says otherwise.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from capibara.hardware.facts import GiB
from capibara.kernels.lab.bench import versions
from capibara.memory import HBMOptimizer, TpuMemoryManager
from capibara.memory.offload import HostCopy

TIMES_THE_LIMIT = 3


@functools.partial(jax.jit, static_argnums=1)
def drawn(number: int, side: int) -> jax.Array:
    return jax.random.bits(jax.random.key(number), (side, side), jnp.uint16).astype(jnp.bfloat16) / 65536


@jax.jit
def used(weight: jax.Array, start: jax.Array, length: jax.Array) -> jax.Array:
    """A chain of products with rows that stay small."""
    return jax.lax.fori_loop(0, length, lambda _, rows: jnp.tanh(rows @ weight), start)


@jax.jit
def same_bits(a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.all(jax.lax.bitcast_convert_type(a, jnp.uint16) == jax.lax.bitcast_convert_type(b, jnp.uint16))


def timed(work: Any) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def transfer_seconds(side: int) -> float:
    """Of one tensor from the host's memory to the device's."""
    copy = HostCopy(drawn(0, side)).wait()
    return statistics.median(timed(lambda: copy.to_device().block_until_ready()) for _ in range(7))


def chain_length(side: int, start: jax.Array, seconds: float) -> int:
    """Products that take about so long."""
    weight = drawn(0, side)
    used(weight, start, jnp.int32(1)).block_until_ready()
    few, many = 4, 36
    times = [
        statistics.median(timed(lambda n=n: used(weight, start, jnp.int32(n)).block_until_ready()) for _ in range(5))
        for n in (few, many)
    ]
    return max(1, round(seconds / max((times[1] - times[0]) / (many - few), 1e-9)))


def managed(limit_gib: float, prefetch: bool) -> TpuMemoryManager:
    return TpuMemoryManager(limit_gib, cleanup_threshold=0.8, prefetch_enabled=prefetch)


def check_bits(asked: argparse.Namespace, side: int, count: int) -> dict[str, Any]:
    """Every tensor away and back, beside a second draw of it."""
    manager = managed(asked.limit_gib, prefetch=True)
    wrong = []
    with manager.managed_context():
        for number in range(count):
            manager.register(f"{number}", drawn(number, side), policy="offload")
        for number in range(count):
            tensor, again = manager.get(f"{number}"), drawn(number, side)
            if not bool(same_bits(tensor, again)):
                wrong.append(number)
            del tensor, again
    stats = manager.stats()
    del stats["tensors"]
    return {"tensors_that_differ": wrong, "within_limit": stats["peak_bytes"] <= stats["limit_bytes"], **stats}


def round_of(manager: TpuMemoryManager, count: int, start: jax.Array, length: jax.Array) -> None:
    for number in range(count):
        tensor = manager.get(f"{number}")
        used(tensor, start, length).block_until_ready()
        del tensor


def products_alone(side: int, count: int, start: jax.Array, length: jax.Array) -> None:
    tensor = drawn(0, side)
    for _ in range(count):
        used(tensor, start, length).block_until_ready()


def streamed(
    optimizer: HBMOptimizer, arrays: list[np.ndarray], start: jax.Array, length: jax.Array, gib: float, stage: bool
) -> None:
    stream = optimizer.stream(arrays, capacity_gb=gib, stage=stage)
    for tensor in stream:
        used(tensor, start, length).block_until_ready()


def hidden(without: float, ahead: float, alone: float) -> float | None:
    """The share of the transfers' time; None where they take none that can be seen."""
    return (without - ahead) / (without - alone) if without > alone else None


def _rates(told: dict[str, float]) -> dict[str, float]:
    """What the last stream told of itself, and GB a second of its two legs, each a thread's while it was at it."""
    legs = {"transfer": "transfer_seconds", "staging_a_thread": "staging_seconds"}
    return told | {
        f"{leg}_gb_per_second": told["bytes"] / told[key] / 1e9 for leg, key in legs.items() if told.get(key)
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tensor-mib", type=int, default=512)
    parser.add_argument("--limit-gib", type=float, default=16.0)
    parser.add_argument("--rows", type=int, default=256, help="of what a tensor is multiplied with")
    parser.add_argument("--work", type=float, default=1.5, help="products of a use, in transfers of a tensor")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", metavar="FILE")
    asked = parser.parse_args()
    side = int((asked.tensor_mib * 2**20 / 2) ** 0.5) // 128 * 128
    size = side * side * 2
    count = -(-TIMES_THE_LIMIT * int(asked.limit_gib * GiB) // size)
    document: dict[str, Any] = {
        "command": " ".join(["python", *sys.argv]),
        "date": time.strftime("%Y-%m-%d"),
        "device": jax.devices()[0].device_kind,
        "versions": versions(),
        "tensor_bytes": size,
        "tensors": count,
        "limit_bytes": int(asked.limit_gib * GiB),
        "workload": check_bits(asked, side, count),
    }
    start = jnp.ones((asked.rows, side), jnp.bfloat16)
    transfer = transfer_seconds(side)
    length = jnp.int32(chain_length(side, start, asked.work * transfer))
    managers = {"without prefetch": managed(asked.limit_gib, False), "with prefetch": managed(asked.limit_gib, True)}
    for manager in managers.values():
        for number in range(count):
            manager.register(f"{number}", np.asarray(drawn(number, side)), policy="offload")
    arrays = [np.asarray(drawn(number, side)) for number in range(count)]
    streams = {
        "stream, random": (HBMOptimizer("random", "lru", 1e6), False),
        "stream, sequential, not staged": (HBMOptimizer("sequential", "lru", 1e6), False),
        "stream, sequential": (HBMOptimizer("sequential", "lru", 1e6), True),
    }
    forms: dict[str, Any] = {
        "products alone": lambda: products_alone(side, count, start, length),
        **{name: functools.partial(round_of, one, count, start, length) for name, one in managers.items()},
        **{
            name: functools.partial(streamed, one, arrays, start, length, asked.limit_gib, stage)
            for name, (one, stage) in streams.items()
        },
    }
    for form in forms.values():
        form()
    taken: dict[str, list[float]] = {name: [] for name in forms}
    for _ in range(asked.repeats):
        for name, form in forms.items():
            taken[name].append(timed(form))
    seconds = {name: statistics.median(times) for name, times in taken.items()}
    alone = seconds["products alone"]
    stats = managers["with prefetch"].stats()
    document |= {
        "transfer_seconds": transfer,
        "transfer_gb_per_second": size / transfer / 1e9,
        "products_a_use": int(length),
        "round_seconds": seconds,
        "prefetch_hits": stats["prefetch_hits"],
        "gets": stats["hits"] + stats["misses"],
        "hidden_by_prefetch": hidden(seconds["without prefetch"], seconds["with prefetch"], alone),
        "hidden_by_stream": hidden(seconds["stream, random"], seconds["stream, sequential"], alone),
        "hidden_by_stream_not_staged": hidden(
            seconds["stream, random"], seconds["stream, sequential, not staged"], alone
        ),
        "streams": {name: _rates(one.last_stream) for name, (one, _) in streams.items()},
        "promise_hidden": 0.7,
    }
    text = json.dumps(document, indent=1)
    print(text)
    if asked.out:
        Path(asked.out).write_text(text + "\n", encoding="utf-8")
    return 0 if document["workload"]["within_limit"] and not document["workload"]["tensors_that_differ"] else 1


if __name__ == "__main__":
    sys.exit(main())
