"""What a program computes (`trace`), and what one chip of a mesh does when it runs there (`spread`)."""

from __future__ import annotations

from capibara.program.chip import Buffer, ChipProgram, Collective, Loop, Step
from capibara.program.graph import Program
from capibara.program.spreading import spread
from capibara.program.tracing import trace

__all__ = ["Buffer", "ChipProgram", "Collective", "Loop", "Program", "Step", "spread", "trace"]
