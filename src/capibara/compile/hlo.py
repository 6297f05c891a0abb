"""What the optimized HLO of a TPU program says about its kernels: opcodes and VMEM.

The compiler writes the VMEM it gave to each instruction into the instruction's backend config, which is there
even when nothing was dumped.
"""

from __future__ import annotations

import re
from typing import NamedTuple

__all__ = ["HloKernel", "hlo_kernels"]

_INSTRUCTION = re.compile(r"^\s*(?:ROOT\s+)?%?([\w.-]+)\s*=\s*(.*)$")
# The opcode is the first lower-case word before a parenthesis; tile annotations such as T(8,128) are not.
_OPCODE = re.compile(r"(?<![\w:%.-])([a-z][a-z0-9-]*)\(")
_CONFIGS = re.compile(r'"(used_)?scoped_memory_configs":\s*\[([^\]]*)\]')
_CONFIG = re.compile(r"\{[^}]*\}")
_VMEM_SPACE = re.compile(r'"memory_space":\s*"?1"?\s*[,}]')
_SIZE = re.compile(r'"size":\s*"?(\d+)"?')


class HloKernel(NamedTuple):
    """One instruction that uses VMEM."""

    name: str
    opcode: str | None
    vmem_bytes: int
    vmem_limit_bytes: int | None


def hlo_kernels(text: str) -> list[HloKernel]:
    """Instructions of an HLO module (`compiled.as_text()`) for which the compiler set VMEM aside."""
    kernels = []
    for line in text.splitlines():
        if "used_scoped_memory_configs" not in line or not (found := _INSTRUCTION.match(line)):
            continue
        used = limit = None
        for is_used, configs in _CONFIGS.findall(line):
            size = _vmem_size(configs)
            if is_used:
                used = size
            else:
                limit = size
        if used:
            opcode = _OPCODE.search(found[2])
            kernels.append(HloKernel(found[1], opcode[1] if opcode else None, used, limit))
    return kernels


def _vmem_size(configs: str) -> int | None:
    sizes = [_SIZE.search(config) for config in _CONFIG.findall(configs) if _VMEM_SPACE.search(config)]
    return sum(int(size[1]) for size in sizes if size) if sizes else None
