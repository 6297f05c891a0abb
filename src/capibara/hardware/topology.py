"""TPU slices: names to chip grids and back, which axes wrap, and devices to compile for without a TPU.

The number in a slice's name counts TensorCores for v2, v3, v4, v5p and 7x and chips for v5e and v6e, so
"v4-32" is 16 chips. Everything here says chips; the other count appears only inside names.

Sources: cloud.google.com/tpu/docs/{v2,v3,v4,v5e,v5p,v6e,tpu7x} and .../types-topologies for the shapes
(the default for a size is the one nearest a cube); jax-ml.github.io/scaling-book/tpus for the wrap-around
links; MaxText's accelerator table for what libtpu calls each topology.
"""

from __future__ import annotations

import functools
import importlib.util
import math
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from capibara.distribution import install_command
from capibara.errors import CapibaraError, TPUError, rule_error, unknown_name
from capibara.hardware import chips as table
from capibara.hardware.facts import Chip, SliceFamily

__all__ = ["Slice", "abstract_devices", "place", "slice_by_grid", "slice_by_name", "slice_for", "slice_names"]


# An axis longer than this is offered by no public table.
_LONGEST_AXIS = 256
_CUBE = 4
_MOST_GPUS = 8


@dataclass(frozen=True)
class Slice:
    """A TPU slice: so many chips of one kind, wired as a grid; or the GPUs of one host (`place`)."""

    name: str
    """Google's name ("v4-32") for the default grid of a size, "v4:4x4x16" for any other."""
    chip: Chip
    grid: tuple[int, ...]

    @property
    def _family(self) -> SliceFamily:
        return _family_for_chip(self.chip)

    @property
    def chips(self) -> int:
        return math.prod(self.grid)

    @property
    def cores(self) -> int:
        """TensorCores; for the count in messages use `chips`."""
        return self.chips * self.chip.cores_per_chip

    @property
    def devices(self) -> int:
        """jax devices the slice shows up as."""
        return self.chips * self.chip.devices_per_chip

    @property
    def hosts(self) -> int:
        """Machines, which is processes that jax.distributed has to see."""
        return max(1, self.chips // math.prod(self.chips_per_host_bounds))

    @property
    def chips_per_host_bounds(self) -> tuple[int, int, int]:
        """The part of the grid that one host holds."""
        if self.chips <= self._family.host_chips:
            return _three(self.grid)
        return (2, 2, 1)

    @property
    def wrap(self) -> tuple[bool, ...]:
        """For each axis, whether its two ends are linked.

        The optical switches that close an axis sit between whole cubes of 4x4x4, so a 3-D slice wraps
        everywhere or nowhere; a 2-D one wraps along an axis that spans the pod.
        """
        if self._family.cubes:
            return (all(axis % _CUBE == 0 for axis in self.grid),) * len(self.grid)
        return tuple(axis == self._family.wrap_length for axis in self.grid)

    @property
    def accelerator_type(self) -> str | None:
        """What `gcloud --accelerator-type` takes; None for a grid that is not the default of its size."""
        if ":" in self.name:
            return None
        return f"{self._family.accelerator_prefix or self._family.prefix}-{self.chips * self._family.per_chip}"

    @property
    def topology_name(self) -> str:
        """What libtpu calls it: "v4:2x4x4"."""
        return f"{self._family.libtpu_prefix}:{_text(self.grid)}"

    @property
    def topology_args(self) -> dict[str, Any]:
        """Arguments for `jax.experimental.topologies.get_topology_desc`."""
        return {
            "platform": "tpu",
            "topology_name": self.topology_name,
            "chip_config_name": self._family.chip_config,
            "chips_per_host_bounds": self.chips_per_host_bounds,
            "num_slices": 1,
        }

    def __str__(self) -> str:
        return f"{self.name} ({_count(self.chips)}, {_text(self.grid)})"


def _text(grid: Sequence[int]) -> str:
    return "x".join(map(str, grid))


def _count(chips: int) -> str:
    return "1 chip" if chips == 1 else f"{chips} chips"


def _three(grid: tuple[int, ...]) -> tuple[int, int, int]:
    x, y, z = (*grid, 1)[:3]
    return x, y, z


def _near_cube(cubes: int) -> tuple[int, int, int]:
    """The three factors that are nearest to a cube: the smallest surface for the volume."""
    shapes = [
        (a, b, cubes // a // b)
        for a in range(1, round(cubes ** (1 / 3)) + 1)
        if cubes % a == 0
        for b in range(a, math.isqrt(cubes // a) + 1)
        if cubes // a % b == 0
    ]
    return min(shapes, key=lambda s: s[0] * s[1] + s[1] * s[2] + s[0] * s[2])


@functools.lru_cache(maxsize=64)
def _grids(family: SliceFamily) -> dict[int, tuple[int, ...]]:
    """The default grid of every size that has a name, smallest first."""
    grids: dict[int, tuple[int, ...]] = {math.prod(grid): grid for grid in family.small}
    if family.cubes:
        for cubes in range(1, family.max_chips // _CUBE**3 + 1):
            grid = tuple(_CUBE * axis for axis in _near_cube(cubes))
            if max(grid) <= _LONGEST_AXIS:
                grids[math.prod(grid)] = grid
    return grids


def _is_valid(family: SliceFamily, grid: tuple[int, ...]) -> bool:
    if grid in family.small:
        return True
    if not family.cubes or len(grid) != 3:
        return False
    whole_cubes = all(axis >= _CUBE and axis % _CUBE == 0 for axis in grid)
    return whole_cubes and max(grid) <= _LONGEST_AXIS and math.prod(grid) <= family.max_chips


def _name(family: SliceFamily, chips: int) -> str:
    return f"{family.prefix}-{chips * family.per_chip}"


def _make(family: SliceFamily, grid: tuple[int, ...]) -> Slice:
    chips = math.prod(grid)
    default = _grids(family).get(chips) == grid
    name = _name(family, chips) if default else f"{family.prefix}:{_text(grid)}"
    return Slice(name, _chip_of(family), grid)


def _rule(family: SliceFamily) -> str:
    meaning = "counts chips" if family.per_chip == 1 else f"is {family.per_chip} for each chip"
    sizes = "x".join("AB") if not family.cubes else "x".join("ABC")
    example = _make(family, family.small[min(2, len(family.small) - 1)])
    if family.cubes:
        shapes = f"{', '.join(map(_text, family.small))} and whole 4x4x4 cubes up to {family.max_chips} chips"
    else:
        shapes = ", ".join(map(_text, family.small))
    return (
        f"The number in a {family.prefix} slice's name {meaning} "
        f"({example.name} means {_count(example.chips)}) and its grid {sizes} is one of {shapes}"
    )


def _nearest(family: SliceFamily, chips: float) -> str:
    """The named slices on both sides of a size, in words."""
    sizes = sorted(_grids(family))
    below = [size for size in sizes if size <= chips][-1:]
    above = [size for size in sizes if size > chips][:1]
    return " or ".join(str(_make(family, _grids(family)[size])) for size in below + above)


def _families() -> list[SliceFamily]:
    return [one.slices for one in table.CHIPS if one.slices is not None]


def _chip_of(family: SliceFamily) -> Chip:
    return next(one for one in table.CHIPS if one.slices == family)


def _family_of(text: str, whole: str) -> SliceFamily:
    prefix = re.sub(r"^tpu[\s_\-]?(?=v)", "", text.lower())
    for family in _families():
        if prefix in (family.prefix, *family.other_prefixes):
            return family
    raise unknown_name("TPU slice", whole, [_name(one, 16) for one in _families()])


def slice_names(which: str | Chip | None = None) -> Iterator[str]:
    """Every slice name, or those of one chip, smallest first."""
    families = _families() if which is None else (_family_for_chip(which),)
    for family in families:
        yield from (_name(family, chips) for chips in _grids(family))


def slice_by_name(name: str | Slice) -> Slice:
    """The slice called "v4-32", "v5litepod-16" or, by its grid, "v4:2x2x4"."""
    if isinstance(name, Slice):
        return name
    text = name.strip()
    if match := re.fullmatch(r"([\w\- ]+?)[:=](\d+(?:x\d+)*)", text):
        return slice_by_grid(_chip_of(_family_of(match[1], text)), tuple(map(int, match[2].split("x"))))
    match = re.fullmatch(r"([\w \-]+?)-(\d+)", text)
    family = _family_of(match[1] if match else text, text)
    if match is None:
        raise rule_error(_rule(family), repr(name), f"add a size: {_nearest(family, 16)}")
    number = int(match[2])
    if number % family.per_chip or number // family.per_chip not in _grids(family):
        raise rule_error(_rule(family), repr(name), f"use {_nearest(family, number / family.per_chip)}")
    return _make(family, _grids(family)[number // family.per_chip])


def slice_by_grid(which: str | Chip, grid: Sequence[int]) -> Slice:
    """The slice of this chip with this grid; axes may come in any order."""
    family = _family_for_chip(which)
    given = tuple(int(axis) for axis in grid)
    # Devices report three coordinates even where the wiring has two.
    flat = tuple(axis for axis in given if axis != 1) if not family.cubes and len(given) == 3 else given
    flat = flat or (1, 1)
    small = {tuple(sorted(one)): one for one in family.small}
    ordered = small.get(tuple(sorted(flat)), tuple(sorted(flat)))
    if min(given, default=0) < 1 or not _is_valid(family, ordered):
        nearest = _nearest(family, max(1, math.prod(given)))
        raise rule_error(_rule(family), f"a grid of {_text(given) or 'no axes'}", f"use {nearest}")
    return _make(family, ordered)


def slice_for(which: str | Chip, chips: int) -> Slice:
    """The default slice of so many chips: `slice_for("v4", chips=32)` is v4-64, a grid of 2x4x4."""
    family = _family_for_chip(which)
    if chips not in _grids(family):
        raise rule_error(_rule(family), _count(chips), f"use {_nearest(family, chips)}")
    return _make(family, _grids(family)[chips])


def _family_for_chip(which: str | Chip) -> SliceFamily:
    found = table.chip(which)
    if found.slices is None:
        tpus = ", ".join(one.name for one in table.CHIPS if one.slices is not None)
        raise rule_error("Only TPUs come in slices", found.name, f"name one of {tpus}")
    return found.slices


def place(on: str | Slice) -> Slice:
    """The slice called "v4-32" or "v4:2x2x4", or so many GPUs of a host: "h200", "h200x8".

    Examples:
        >>> place("v4-64").chips, place("h200x8").chips
        (32, 8)
    """
    if isinstance(on, Slice):
        return on
    text = on.strip()
    match = re.fullmatch(r"(?P<kind>.+?)(?:x(?P<count>\d+))?", text)
    gpus = [one for one in table.CHIPS if one.platform == "gpu"]
    if match is not None and ":" not in text:
        try:
            found = table.chip(match["kind"])
        except ValueError:
            found = None
        if found is not None and found.platform == "gpu":
            count = int(match["count"] or 1)
            if count & (count - 1) or not 1 <= count <= _MOST_GPUS:
                rule = f"A host has 1, 2, 4 or {_MOST_GPUS} GPUs"
                raise rule_error(rule, repr(on), f"use {match['kind']}x{_MOST_GPUS}")
            return Slice(text, found, (count,))
        if found is not None and found.platform == "cpu":
            raise rule_error(
                "What is planned or compiled ahead is for a TPU slice or GPUs",
                repr(on),
                "name a slice such as v4-32, or h200",
            )
    try:
        return slice_by_name(text)
    except ValueError as error:
        if str(error).startswith("Unknown TPU slice"):
            # The cubes of 128 cores up to v4-8192 would bury the rest.
            usual = [name for name in slice_names("v4") if slice_by_name(name).chips.bit_count() == 1]
            names = [*usual, *(one.name for one in gpus), *("v5e-16", "v5p-32", "v6e-16")]
            raise unknown_name("slice or GPU", on, names) from None
        raise


def abstract_devices(name: str | Slice) -> list[Any]:
    """Devices of a slice, or the GPUs of a host, to lower and compile for, with none attached.

    A TPU's need libtpu (x86-64 Linux), a GPU's jax's plugin for CUDA, which needs no driver.
    """
    wanted = place(name)
    if wanted.chip.platform == "gpu":
        return _abstract_gpus(wanted)
    if importlib.util.find_spec("libtpu") is None:
        raise TPUError(
            f"Compiling for {wanted} needs the TPU compiler, and libtpu is not installed. "
            f"Install it with: {install_command('tpu')} (x86-64 Linux only; no TPU is needed)."
        )
    # Read by libtpu when it loads: without it, it waits for a metadata server that only a TPU VM has.
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    from jax.experimental import topologies

    return list(topologies.get_topology_desc(**wanted.topology_args).devices)


def _abstract_gpus(wanted: Slice) -> list[Any]:
    # Read by the plugin when jax looks for plugins: else it asks the driver, which is not there, for its version.
    os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
    from jax.experimental import topologies

    from capibara.hardware.gpu_target import target_config

    try:
        found = topologies.get_topology_desc(
            wanted.chip.name,
            platform="cuda",
            target_config=target_config(wanted.chip),
            topology=f"1x1x{wanted.chips}",  # partitions, hosts of each, GPUs of each
        )
    except NotImplementedError as error:
        raise CapibaraError(
            f"Compiling for {wanted.name} needs jax's plugin for CUDA, which this process has not loaded "
            f"({error}). Install it with: {install_command('cuda')} (no GPU is needed); where it is installed and "
            "jax has started already, set JAX_PLATFORMS=cpu or JAX_SKIP_CUDA_CONSTRAINTS_CHECK=1 before Python starts."
        ) from error
    return list(found.devices)
