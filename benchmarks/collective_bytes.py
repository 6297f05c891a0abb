"""What an all-reduce of gradients sends, read from the compiled program: float32, bfloat16 and compressed; and losses.

    python benchmarks/collective_bytes.py --json benchmarks/results/DATE-cpu-collective-bytes.json

Programs are compiled for 8 and 32 virtual CPU devices. Bytes are what one device sends in rings: (n - 1) / n of what a
reduce-scatter or an all-to-all takes and an all-gather gives, twice that for an all-reduce. "Across" is the part that
goes between groups of four devices, where a program tells them apart: the slow links of several slices. Losses
are of the small model of examples/parallel/compressed_gradients.py, trained alike but for its all-reduce.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import re
import runpy
import sys
from datetime import date
from pathlib import Path
from typing import Any

VIRTUAL = "--xla_force_host_platform_device_count=32"
EXAMPLE = Path(__file__).parent.parent / "examples" / "parallel" / "compressed_gradients.py"
# A decoder layer of width 512 with its norms: leaves that divide by nothing in particular are among them.
SHAPES = {"attention": (4, 512, 512), "up": (512, 1365), "down": (1365, 512), "norms": (2, 512), "bias": (1365,)}
WAYS = ("float32", "compressed", "bfloat16", "float32 inside, then across", "float32 inside, compressed across")

_COLLECTIVE = re.compile(
    r" = (?P<made>\(.*?\)|\S+) (?P<kind>all-reduce|reduce-scatter|all-gather|all-to-all|collective-permute)"
    r"(?P<start>-start)?\("
)
_SHAPE = re.compile(r"(?P<kind>[a-z]+\d+)\[(?P<shape>[\d,]*)\]")
_LISTED = re.compile(r"replica_groups=\{\{(?P<group>[\d,]+)\}")
_COUNTED = re.compile(r"replica_groups=\[\d+,(?P<size>\d+)\]<=")
# Groups that are not neighbours: a step of more than one in a list, or a transposed count.
_APART = re.compile(r"replica_groups=(?:\{\{0,(?!1[,}])|\[[\d,]+\]<=\[[\d,]+\]T)")


def sent_bytes(hlo: str, devices: int, *, across: bool = False) -> float:
    """Bytes that one device sends in all collectives of an HLO module, or in those across groups of neighbours."""
    found = ((line, _COLLECTIVE.search(line)) for line in hlo.splitlines())
    return sum(_sent(line, kind, devices) for line, kind in found if kind and (not across or _APART.search(line)))


def _sent(line: str, found: re.Match[str], devices: int) -> float:
    assert not found["start"], "asynchronous collectives list operands and results together: compile without them"
    size = sum(
        int(re.sub(r"\D", "", kind)) // 8 * math.prod(map(int, filter(None, shape.split(","))))
        for kind, shape in _SHAPE.findall(found["made"])
    )
    if found["kind"] == "collective-permute":
        return float(size)
    if listed := _LISTED.search(line):
        members = listed["group"].count(",") + 1
    else:
        counted = _COUNTED.search(line)
        members = int(counted["size"]) if counted else devices
    # Results are counted: a reduce-scatter's is an nth of what it takes.
    whole = size * members if found["kind"] == "reduce-scatter" else size
    return (2 if found["kind"] == "all-reduce" else 1) * whole * (members - 1) / members


def program(way: str, devices: int) -> str:
    """The optimized HLO of one way to add up gradients over so many devices."""
    import jax
    from jax.sharding import AxisType
    from jax.sharding import PartitionSpec as P

    from capibara.kernels.ops.collective.buckets import bucketed, bucketed_all_reduce
    from capibara.kernels.ops.collective.compressed import compressed_all_reduce
    from capibara.kernels.ops.collective.hierarchical import hierarchical_all_reduce

    def reduce(tree: Any) -> Any:
        tree = jax.tree.map(lambda x: x[0], tree)
        if way == "compressed":
            return compressed_all_reduce(tree, "data")[0]
        if way == "float32 inside, compressed across":
            return compressed_all_reduce(tree, "data", inner_axis_name="chip")[0]
        if way == "float32 inside, then across":
            buckets, restore = bucketed(tree)
            return restore(
                [hierarchical_all_reduce(x, inner_axis_name="chip", outer_axis_name="data") for x in buckets]
            )
        return bucketed_all_reduce(tree, ("data", "chip"))

    inner = 4 if "inside" in way else 1
    kinds = (AxisType.Auto,) * 2
    mesh = jax.make_mesh((devices // inner, inner), ("data", "chip"), axis_types=kinds, devices=jax.devices()[:devices])
    dtype = "bfloat16" if way == "bfloat16" else "float32"
    tree = {name: jax.ShapeDtypeStruct((devices, *shape), dtype) for name, shape in SHAPES.items()}
    mapped = jax.shard_map(reduce, mesh=mesh, in_specs=P(("data", "chip")), out_specs=P(), check_vma=inner > 1)
    # As traced: the CPU's compiler would widen a sum of bfloat16, as it has none.
    lowered = jax.jit(mapped).lower(tree)
    return lowered.as_text(dialect="hlo") if way == "bfloat16" else lowered.compile().as_text()


def rows() -> list[dict[str, Any]]:
    made = []
    for devices in (8, 32):
        programs = {way: program(way, devices) for way in WAYS}
        exact = sent_bytes(programs["float32"], devices)
        for way, hlo in programs.items():
            sent = sent_bytes(hlo, devices)
            across = sent_bytes(hlo, devices, across=True) if "inside" in way else None
            made.append({"devices": devices, "way": way, "bytes": sent, "of_float32": sent / exact, "across": across})
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the rows there, with date, device, versions and command")
    asked = parser.parse_args()
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {VIRTUAL}"
    import jax

    jax.config.update("jax_platforms", "cpu")
    print("| devices | all-reduce | bytes a device sends | of float32 | across |\n|---|---|---|---|---|")
    found = rows()
    for row in found:
        across = "" if row["across"] is None else f"{row['across']:,.0f}"
        print(f"| {row['devices']} | {row['way']} | {row['bytes']:,.0f} | {row['of_float32']:.3f} | {across} |")
    example = runpy.run_path(str(EXAMPLE))
    losses = [row for devices in (8, 32) for row in example["losses"](devices)]
    hostile = example["hostile_losses"]()
    print("\n| devices | all-reduce | final loss | of exact |\n|---|---|---|---|")
    for row in losses:
        print(f"| {row['devices']} | {row['way']} | {row['loss']:.4f} | {row['of_exact']:.4f} |")
    print("\n| small gradients beside a large one | final loss |\n|---|---|")
    for way, loss in hostile.items():
        print(f"| {way} | {loss:.2e} |")
    if asked.json is None:
        return
    record = {
        "date": date.today().isoformat(),
        "device": f"virtual CPU devices, {platform.machine()}, {len(os.sched_getaffinity(0))} cores",
        "jax": jax.__version__,
        "python": platform.python_version(),
        "command": "python benchmarks/collective_bytes.py --json PATH",
        "notes": "bytes are of the compiled program; bfloat16's of the program as traced, for a CPU widens its sum",
        "rows": found,
        "losses": losses,
        "small_gradients_beside_a_large_one": hostile,
    }
    asked.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
