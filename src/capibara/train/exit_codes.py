"""How a training process ends, as the supervisor and whoever starts one reads it."""

from __future__ import annotations

__all__ = ["BAD_INPUT", "DOES_NOT_FIT", "DONE", "FAILED", "FINAL", "HUNG", "LOWERED_ONLY", "PREEMPTED"]

DONE = 0
FAILED = 1
BAD_INPUT = 2
DOES_NOT_FIT = 3
LOWERED_ONLY = 4
PREEMPTED = 42
"""It was told to stop, saved, and can be started again later."""
HUNG = 43
"""Its watchdog saw no progress, wrote down every stack, and ended it. To be started again at once."""

FINAL = frozenset({DONE, BAD_INPUT, DOES_NOT_FIT, LOWERED_ONLY, PREEMPTED})
"""Starting the same command again at once would give the same."""
