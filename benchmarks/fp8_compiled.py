"""What XLA's compiler for GPUs makes of a training step's loss and gradients in fp8: compiled for an H200, not run.

    python benchmarks/fp8_compiled.py --out fp8_compiled.json

Needs jax's plugin for CUDA and no GPU (`capibara kernels compile --for h200` says whether it is there). The decoder is
the 1.14B Llama's shape with fewer layers, written out. Counted in the optimised program: products that are calls of
cuBLASLt's fp8 kernels, and of its others; and the bytes that all kernels but products read and write, each operand and
result once. There is no GPU to time Triton's products on, so that they are switched off, as a user may.
"""

from __future__ import annotations

import argparse
import json
import platform
import re
import sys
import time
from pathlib import Path
from typing import Any

import jax

from capibara.compile.aot import _lower_on
from capibara.hardware.topology import abstract_devices
from capibara.kernels import target
from capibara.models import ModularModelConfig, decoder
from capibara.precision import Fp8Settings

FORMS: dict[str, Fp8Settings | None] = {
    "bfloat16": None,
    "fp8": Fp8Settings(),
    "fp8 delayed": Fp8Settings(scaling="delayed"),
    "fp8 block": Fp8Settings(scales="block"),
}
_BYTES = {"f32": 4, "s32": 4, "u32": 4, "bf16": 2, "f16": 2, "f8e4m3fn": 1, "f8e5m2": 1, "s8": 1, "u8": 1, "pred": 1}
_INSTRUCTION = re.compile(r"\s+(?:ROOT )?%(\S+) = (.+?) ([\w\-]+)\((.*)")
_PRODUCT = re.compile(r"cublas|gemm")


def _size(shape: str) -> int:
    total = 0
    for kind, sizes in re.findall(r"(\w+)\[([\d,]*)\]", shape):
        count = 1
        for size in filter(None, sizes.split(",")):
            count *= int(size)
        total += count * _BYTES.get(kind, 0)
    return total


def counted(text: str) -> dict[str, Any]:
    """Products by the kernels that they call, and the bytes of all other kernels, of an optimised program."""
    with_products = {
        match[1]
        for match in re.finditer(r"^%(\S+) \(.*?\{\n(.*?)^\}", text, re.MULTILINE | re.DOTALL)
        if "__cublas" in match[2]
    }
    shapes: dict[str, str] = {}
    moved = kernels = 0
    for line in text[text.index("\nENTRY") :].splitlines():
        found = _INSTRUCTION.match(line)
        if found is None:
            continue
        name, shape, kind, rest = found.groups()
        shapes[name] = shape
        calls = re.search(r"calls=%(\S+?)[,\s}]", line)
        if kind not in ("fusion", "custom-call", "copy", "transpose", "convert", "reduce") or _PRODUCT.search(
            (re.search(r'custom_call_target="([^"]*)"', line) or [""])[0]
        ):
            continue
        if calls is not None and calls[1] in with_products:
            continue
        operands = re.findall(r"%([\w.\-]+)", rest.split("),")[0])
        moved += _size(shape) + sum(_size(shapes.get(operand, "")) for operand in operands)
        kernels += 1
    return {
        "fp8_products": text.count('custom_call_target="__cublas$lt$matmul$f8"'),
        "other_products": len(re.findall(r'custom_call_target="__cublas\$(?:lt\$matmul|gemm)"', text)),
        "other_kernels": kernels,
        "other_kernels_gb": moved / 1e9,
    }


def compiled(form: str, layers: int, batch: int, length: int) -> dict[str, Any]:
    fp8 = FORMS[form]
    blocks = {"attention": {"heads": 16, "kv_heads": 8}, "mlp": {"ffn": 8192}}
    model = ModularModelConfig(hidden=2048, layers=layers, vocab=32000, blocks=blocks)
    history = None if fp8 is None else decoder.fp8_history_shapes(model, fp8)

    def gradients(params: Any, history: Any, batch: Any) -> Any:
        def loss(pair: Any) -> Any:
            return decoder.loss(model, pair[0], batch, unroll=True, fp8=fp8, fp8_history=pair[1])[0]

        return jax.value_and_grad(loss)((params, history))

    args = (decoder.param_shapes(model), history, decoder.batch_shapes(batch, length))
    start = time.perf_counter()
    with target("gpu", "NVIDIA H200"):
        lowered = _lower_on(abstract_devices("h200")[0], gradients, args)
    program = lowered.compile(compiler_options={"xla_gpu_enable_triton_gemm": False})
    return {
        "form": form,
        "compile_s": time.perf_counter() - start,
        "temporaries_gib": program.memory_analysis().temp_size_in_bytes / 2**30,
        **counted(program.as_text()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--forms", default=";".join(FORMS), help="apart by ;")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--out", help="write the rows as JSON")
    asked = parser.parse_args()
    rows = []
    for form in asked.forms.split(";"):
        rows.append(compiled(form, asked.layers, asked.batch, asked.length))
        print(rows[-1], flush=True)
        if asked.out:
            document = {
                "date": time.strftime("%Y-%m-%d"),
                "device": "NVIDIA H200, compiled for; predicted, not run",
                "versions": {"jax": jax.__version__, "python": platform.python_version()},
                "command": " ".join(["python", *sys.argv]),
                "rows": rows,
            }
            Path(asked.out).write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
