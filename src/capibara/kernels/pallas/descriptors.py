"""A Hopper kernel's TMA descriptors are handed to it as words of eight bytes, where Mosaic GPU copies single bytes.

The host's part of a kernel makes the descriptors, of 128 bytes each, on its stack, and copies them into the arguments
of the launch: one load and one store of an array, which LLVM takes apart number by number and vectorizes again. Of the
11 seconds that a gated grouped product with its gradient took to its first call, 38 descriptors in three kernels, that
was four. The same bytes arrive, and a kernel's PTX is the same to the letter.
"""

from __future__ import annotations

import functools
from typing import Any

from jax.experimental.mosaic.gpu import launch_context

WORD_BYTES = 8


def as_words(descriptors: Any, size: int) -> None:
    """Make the `size` bytes at this pointer, and the one load of them, an array of words; leave what looks other."""
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import llvm

    words = llvm.ArrayType.get(ir.IntegerType.get_signless(8 * WORD_BYTES), size // WORD_BYTES)
    loads = [use.owner for use in descriptors.uses if use.owner.name == "llvm.load"]
    if len(loads) != 1 or size % WORD_BYTES:
        return
    descriptors.owner.opview.elem_type = ir.TypeAttr.get(words)
    loads[0].result.set_type(words)


def install() -> None:
    """For every Mosaic GPU kernel that this process lowers from here on; nothing where JAX has no such place."""
    scratch: Any = getattr(launch_context, "Scratch", None)
    finalize = getattr(scratch, "finalize_size", None)
    if finalize is None or hasattr(finalize, "__wrapped__"):
        return

    @functools.wraps(finalize)
    def finalize_size(self: Any) -> None:
        if self.next_offset:
            # Called last, with a pointer to them, when their array has its size.
            self.host_init.append(functools.partial(as_words, size=self.next_offset))
        finalize(self)

    scratch.finalize_size = finalize_size
