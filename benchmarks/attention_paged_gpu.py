"""Paged decoding on a GPU beside jax's own paged attention, in one run, as a share of the memory's bandwidth.

    python benchmarks/attention_paged_gpu.py --json paged.json

Every key and value of every sequence has to be read once: the bytes of a row. jax's kernel (Pallas, Triton) keeps its
pool with the heads first, so it gets one laid out so; the best of its block sizes is kept.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import itertools
import json
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
from attention_gpu import error, timed
from jax.experimental.pallas.ops.gpu.paged_attention import paged_attention as jax_paged_attention

from capibara import hardware
from capibara.kernels import explain, lookup, paged_attention
from capibara.kernels.lab.bench import versions
from capibara.kernels.lab.tuning import failures

OP = lookup("paged_attention")
CASES = ("decode-64x8k", "decode-16x32k", "long-1x128k", "decode-256x2k-small-pages", "narrow-64x4k")


def jax_program(sizes: tuple[int, int, int], q: Any, k: Any, v: Any, table: Any, lengths: Any) -> Any:
    pages, splits, stages = sizes
    q = q * q.shape[-1] ** -0.5  # its kernel does not scale
    return jax_paged_attention(
        q, k, v, table, lengths, pages_per_compute_block=pages, k_splits=splits, num_stages=stages
    )


def jax_programs(pool: ThreadPoolExecutor, given: tuple[Any, ...]) -> dict[str, Any]:
    """jax's kernel, compiled, for every choice of block sizes that divides the table's width."""
    columns = given[3].shape[1]
    jobs = {}
    for pages, splits, stages in itertools.product((1, 2, 4, 8), (1, 4, 16), (2, 4)):
        if columns % splits == 0 and (columns // splits) % pages == 0:
            program = jax.jit(functools.partial(jax_program, (pages, splits, stages))).lower(*given)
            jobs[f"{pages} pages a block, {splits} splits, {stages} stages"] = pool.submit(program.compile)
    made = {}
    for name, job in jobs.items():
        try:
            made[name] = job.result()
        except failures() as failure:
            print(f"jax, {name}: {str(failure).splitlines()[0][:100]}", file=sys.stderr)
    return made


def chosen(case: Any) -> str:
    found = explain(lambda *x: paged_attention(*x, **case.params), *case.args()[:5])
    return "+".join(dict.fromkeys(s.implementation for s in found.selections))


def measure(pool: ThreadPoolExecutor, name: str) -> dict[str, Any]:
    case = OP.case(name)
    arrays = case.arrays()
    ours = jax.jit(lambda *x: paged_attention(*x, **case.params)).lower(*arrays[:5]).compile()
    q, k, v, *rest = arrays[:5]
    by_head = [x.reshape(*x.shape[:2], -1, q.shape[2]).transpose(2, 0, 1, 3) for x in (k, v)]
    theirs = (q, *by_head, *rest)
    programs = jax_programs(pool, theirs)
    found = timed(programs, theirs, rounds=2)
    best = min(found, key=lambda who: found[who])
    seconds = timed({"dispatch": lambda: ours(*arrays[:5]), "jax": lambda: programs[best](*theirs)}, ())
    moved = OP.cost(OP.call(*case.args(), **case.params)).bytes
    chip = hardware.chip_for(jax.devices()[0].device_kind)
    row = {
        "case": name,
        "gigabytes": moved / 1e9,
        "dispatch_takes": chosen(case),
        "jax_takes": best,
        "microseconds": {who: s * 1e6 for who, s in seconds.items()},
        "share_of_bandwidth": {who: moved / s / chip.hbm_bandwidth for who, s in seconds.items()} if chip else {},
        "times_as_fast_as_jax": seconds["jax"] / seconds["dispatch"],
        "difference": error(ours(*arrays[:5]), programs[best](*theirs)),
    }
    shares = "  ".join(f"{who} {share:.3f}" for who, share in row["share_of_bandwidth"].items())
    print(f"{name:26} share of bandwidth: {shares}   {row['times_as_fast_as_jax']:.2f}x jax   ({best})", flush=True)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", help="write the figures here")
    options = parser.parse_args()
    document: dict[str, Any] = {
        "device": jax.devices()[0].device_kind,
        "versions": versions(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": " ".join(["python", *sys.argv]),
        "rows": [],
    }
    with ThreadPoolExecutor(14) as pool:
        for name in CASES:
            document["rows"].append(measure(pool, name))
            if options.json:
                with open(options.json, "w", encoding="utf-8") as out:
                    json.dump(document, out, indent=1)


if __name__ == "__main__":
    main()
