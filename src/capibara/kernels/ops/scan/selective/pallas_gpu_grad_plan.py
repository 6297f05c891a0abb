"""How the Hopper kernel of the selective scan's gradient cuts time, states and shared memory."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from capibara.errors import rule_error
from capibara.kernels.core.spec import Call
from capibara.kernels.ops.scan.selective.pallas_gpu import CHANNELS, refuses_form
from capibara.kernels.ops.scan.selective.pallas_gpu_lanes import WARP
from capibara.kernels.ops.scan.selective.rules import sizes_of
from capibara.kernels.pallas.hopper import SMEM_BYTES

OWN_STATES = WARP // 2  # of a warpgroup, at most: one thread of a warp has the sum of each, of B and of C
MOST_STATES = 2 * OWN_STATES
WIDE = ("x", "dt", "z", "d_out")  # over time and channels


@dataclasses.dataclass(frozen=True)
class ChunkConfig:
    """Steps of a chunk, of which one state is left in memory; steps of a group, whose states are in registers; how many
    chunks are fetched ahead; and how many warpgroups share the states of a channel."""

    steps: int
    group: int
    stages: int
    warpgroups: int = 2

    def __post_init__(self) -> None:
        counted = min(self.steps, self.group, self.stages) >= 1 and self.warpgroups in (1, 2, 4)
        if not counted or self.steps % 16 or self.steps % self.group or self.group % 4:
            raise rule_error(
                "steps is a multiple of 16 and of group, group one of 4, and warpgroups 1, 2 or 4",
                self,
                "use steps=32, group=4, stages=2, warpgroups=2",
            )

    def own_states(self, states: int) -> int:
        """Of a channel's states those of one warpgroup, with some of zero: a warp's threads divide among their sums."""
        return max(4, 1 << math.ceil(math.log2(math.ceil(states / self.warpgroups))))


@dataclasses.dataclass(frozen=True)
class Plan:
    """What a program is told while it is traced."""

    config: ChunkConfig
    time: int
    own: int  # states of a warpgroup
    softplus: bool

    @property
    def chunks(self) -> int:
        return math.ceil(self.time / self.config.steps)

    @property
    def states(self) -> int:
        return self.own * self.config.warpgroups

    @property
    def together(self) -> int:
        """Steps whose sums over a warp are made in one exchange."""
        return WARP // (2 * self.own)


def candidates(call: Call) -> Sequence[ChunkConfig]:
    n = sizes_of(call)
    made = []
    for numbers in ((32, 4, 2, 2), (32, 8, 2, 2), (32, 4, 2, 4), (32, 4, 2, 1), (16, 4, 2, 2), (16, 4, 1, 2)):
        config = ChunkConfig(*numbers)
        plan = Plan(config, n.time, config.own_states(n.states), False)
        if plan.own <= OWN_STATES and _shared_bytes(call, plan) <= SMEM_BYTES - 2048:
            made.append(config)
    return made


def _shared_bytes(call: Call, plan: Plan) -> int:
    config = plan.config
    row = CHANNELS * sum(x.dtype.itemsize for name in WIDE if (x := call[name]) is not None) + 2 * 4 * plan.states
    lines = plan.states * config.steps // config.group  # the states before each group
    lines += config.warpgroups * (2 * 3 * config.group + config.steps // plan.together)
    return config.stages * config.steps * row + 4 * CHANNELS * lines


def refuses(call: Call) -> str | None:
    form = refuses_form(call, WIDE)
    if form is not None:
        return form
    states = sizes_of(call).states
    if states > MOST_STATES:
        return f"the states of a few steps stay in registers, for N up to {MOST_STATES}; N is {states}"
    return None if candidates(call) else "a ring of chunks does not fit shared memory"
