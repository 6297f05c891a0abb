"""What a program computes (`trace`), and what one chip of a mesh does when it runs there (`spread`)."""

from __future__ import annotations

from capibara.parallel.program.chip import Buffer, ChipProgram, Collective, Loop, Step
from capibara.parallel.program.graph import Program
from capibara.parallel.program.spread import spread
from capibara.parallel.program.trace import trace

__all__ = ["Buffer", "ChipProgram", "Collective", "Loop", "Program", "Step", "spread", "trace"]
