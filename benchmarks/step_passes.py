"""What a training step of training_step_gpu.py moves through memory, by the program XLA compiles for an H200; no GPU.

    python benchmarks/step_passes.py [--forms 'models;models cublas'] [--top 20] [--out passes.json]

Needs jax's plugin for CUDA (pip install 'jax[cuda13]'), and no driver; forms with cuDNN's attention need cuDNN, too.
Layers are one after another. A pass is one fusion, copy or kernel of the entry computation: each of its operands
counted once and each of its results; of an operand that it takes slices of, the slices. What a loop does is not
counted: the loss has one, over blocks of rows. Products are listed apart. Without a GPU XLA times no kernel against
another, so which kernel a product gets, and what XLA fuses with it, may differ on a chip.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import re
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from capibara.hardware import abstract_devices
from capibara.kernels import target

_spec = importlib.util.spec_from_file_location("training_step", Path(__file__).with_name("training_step_gpu.py"))
assert _spec is not None
assert _spec.loader is not None
step: Any = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(step)

BYTES = {"f32": 4, "s32": 4, "u32": 4, "bf16": 2, "f16": 2, "pred": 1, "s8": 1, "u8": 1, "f8e4m3fn": 1, "f8e5m2": 1}
NO_PASS = ("parameter", "get-tuple-element", "bitcast", "tuple", "constant", "while")
INSTRUCTION = re.compile(r"\s*(?:ROOT )?%?([\w.\-]+) = (\(.*?\)|\S+) ([\w\-]+)\((.*)")


def moved(shape: str) -> int:
    """Bytes of a shape as HLO writes it, or of a tuple of them."""
    sizes = re.findall(r"(\w+)\[([\d,]*)\]", shape)
    return sum(BYTES.get(kind, 0) * math.prod(int(n) for n in dims.split(",") if n) for kind, dims in sizes)


def elements(shape: str) -> int:
    return math.prod(int(n) for n in re.findall(r"\d+", shape.partition("[")[2].partition("]")[0]))


def read_by(body: str) -> dict[int, int]:
    """Bytes that a fused computation reads of the operands that it takes only slices of, by their numbers."""
    lines = [found for found in map(INSTRUCTION.match, body.splitlines()) if found is not None]

    def users(name: str) -> list[Any]:
        """Of a value, and of what is converted from it: a fusion computes of that what is asked for."""
        direct = [line for line in lines if re.search(rf"%{re.escape(name)}[,)]", line[4])]
        return [user for line in direct for user in (line[3] == "convert" and users(line[1])) or [line]]

    found = {}
    for name, shape, opcode, rest in (line.groups() for line in lines):
        slices = users(name) if opcode == "parameter" else []
        if slices and all(line[3] in ("slice", "dynamic-slice") for line in slices):
            each = BYTES[shape.partition("[")[0]]
            found[int(rest.split(")")[0])] = each * sum(elements(line[2]) for line in slices)
    return found


def passes(text: str) -> list[dict[str, Any]]:
    """Of the entry computation: what is alike by name and result as one row, those that move most first."""
    bodies = dict(re.findall(r"^%(\S+) \(.*?\{\n(.*?)^\}", text, re.MULTILINE | re.DOTALL))
    shapes: dict[str, str] = {}
    rows: dict[tuple[str, str], dict[str, Any]] = defaultdict(lambda: {"launches": 0, "gb": 0.0})
    for line in text[text.index("\nENTRY ") :].split("\n}")[0].splitlines()[2:]:
        read = INSTRUCTION.match(line)
        if read is None:
            continue
        name, shape, opcode, rest = read.groups()
        shape = re.sub(r"\{[^}]*\}|/\*.*?\*/", "", shape)
        shapes[name] = shape
        if opcode in NO_PASS:
            continue
        called = re.search(r'custom_call_target="([^"]+)"', line)
        kind = called.group(1) if called else re.sub(r"[\d.]+$", "", name)
        inside = re.search(r"calls=%(\S+?)[,\s}]", line)
        body = bodies[inside[1]] if inside else ""
        operands = {
            n: moved(shapes.get(one, "")) for n, one in enumerate(re.findall(r"%([\w.\-]+)", rest.split("), ")[0]))
        }
        row = rows[kind, shape]
        # A product that takes a slice of its weight is in a fusion with the slice.
        row |= {"pass": kind, "result": shape, "product": any("gemm" in x or "cublas" in x for x in (kind, body))}
        row["launches"] += 1
        row["gb"] += (moved(shape) + sum((operands | read_by(body)).values())) / 1e9
    return sorted(rows.values(), key=lambda row: -row["gb"])


def compiled(form: str) -> Any:
    there = jax.sharding.SingleDeviceSharding(abstract_devices("h200")[0])
    ids = jax.ShapeDtypeStruct((8, 2048), jnp.int32, sharding=there)
    words = frozenset({*step.FORMS[form], "unrolled"})
    with target("gpu", "NVIDIA H200"):
        return step.compiled_step(step.llama.SHAPES["1b"], words, {"inputs": ids, "targets": ids})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--forms", default="models", help="apart by ;")
    parser.add_argument("--top", type=int, default=20, help="rows to print of a form")
    parser.add_argument("--out", help="write all rows as JSON")
    asked = parser.parse_args()
    found = {}
    for form in asked.forms.split(";"):
        program = compiled(form)
        rows = passes(program.as_text())
        beside = sum(row["gb"] for row in rows if not row["product"])
        found[form] = {
            "products": sum(row["launches"] for row in rows if row["product"]),
            "fp8_products": step.fp8_calls(program),
            "gb_beside_products": beside,
            "temporaries_gib": program.memory_analysis().temp_size_in_bytes / 2**30,
            "rows": rows,
        }
        counts = f"{found[form]['products']} products, {found[form]['fp8_products']} of cuBLASLt's fp8"
        print(f"{form}: {counts}; {beside:.1f} GB by passes beside them")
        for row in [row for row in rows if not row["product"]][: asked.top]:
            print(f"  {row['gb']:7.2f} GB  {row['launches']:4d} x {row['pass']} {row['result'][:80]}")
    if asked.out:
        document = {
            "date": time.strftime("%Y-%m-%d"),
            "device": "compiled for h200, not run",
            "versions": {"jax": jax.__version__},
            "command": " ".join(["python", *sys.argv]),
            "forms": found,
        }
        Path(asked.out).write_text(json.dumps(document, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
