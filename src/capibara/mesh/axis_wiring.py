"""How far apart the neighbours of a mesh are in the hardware."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from capibara.errors import rule_error
from capibara.hardware.topology import Slice, slice_by_name
from capibara.mesh.device_order import device_grid, slice_box
from capibara.mesh.grid_order import coordinates
from capibara.mesh.mesh import MeshConfig

if TYPE_CHECKING:
    import numpy as np
    from jax.sharding import Mesh

__all__ = ["AxisWiring", "wiring"]


@dataclass(frozen=True)
class AxisWiring:
    """One mesh axis: hops over chip-to-chip links from each place to the next, over all lines of the mesh."""

    size: int
    max_hops: int
    mean_hops: float
    closing_hops: int
    """From the last place back to the first, the most of any line: what a ring over the axis needs beside."""
    crosses_slices: bool = False
    """Some steps go over the hosts' network; hops count the others."""

    @property
    def ring(self) -> bool:
        """Whether a ring over this axis is neighbours all round."""
        return not self.crosses_slices and max(self.max_hops, self.closing_hops) <= 1


def wiring(mesh: Mesh | MeshConfig, on: str | Slice | None = None) -> dict[str, AxisWiring]:
    """For each axis of a mesh, how far its neighbours are from each other.

    A mesh of TPU devices is measured where they are. For a config, or virtual devices, `on` names the slice: the mesh
    is then measured as it would be built there.

    Examples:
        >>> wiring(MeshConfig((4, 8)), on="v4-64")["model"]
        AxisWiring(size=8, max_hops=1, mean_hops=1.0, closing_hops=1, crosses_slices=False)
    """
    import numpy as np

    names, sizes = tuple(mesh.axis_names), tuple(mesh.shape if isinstance(mesh, MeshConfig) else mesh.devices.shape)
    if on is not None:
        where = slice_by_name(on)
        if math.prod(sizes) != where.devices:
            raise rule_error(
                f"A mesh takes every device of {where}, {where.devices}",
                f"a mesh of {'x'.join(map(str, sizes))} = {math.prod(sizes)}",
                "change its sizes, or name the slice with as many",
            )
        grid, wrap = slice_box(where)
        return _measured(names, coordinates(sizes, grid, wrap), grid, wrap, np.zeros(sizes, dtype=int))
    if isinstance(mesh, MeshConfig):
        raise rule_error("A mesh that is not built lies nowhere", "no slice", 'pass on="v4-64", or build it')
    return _of_devices(names, mesh.devices)


def _of_devices(names: tuple[str, ...], devices: np.ndarray) -> dict[str, AxisWiring]:
    import numpy as np

    slices: dict[Any, list[Any]] = {}
    for device in devices.flat:
        slices.setdefault(getattr(device, "slice_index", 0) or 0, []).append(device)
    grids = [device_grid(slices[index]) for index in sorted(slices)]
    whole = [grid for grid in grids if grid is not None]
    if len(whole) != len(grids) or len({(grid.shape, grid.wrap) for grid in whole}) > 1:
        raise rule_error(
            "Hops are counted between chips that say where they are and fill a box of the grid",
            f"{devices.size} {devices.flat[0].platform} devices that do not",
            'pass on="v4-64" to measure the mesh as it would lie there',
        )
    places = {key: (index, place) for index, grid in enumerate(whole) for key, place in grid.places().items()}
    found = [places[id(device)] for device in devices.flat]
    return _measured(
        names,
        np.asarray([place for _, place in found]).reshape(*devices.shape, -1),
        whole[0].shape,
        whole[0].wrap,
        np.asarray([index for index, _ in found]).reshape(devices.shape),
    )


def _measured(
    names: tuple[str, ...], places: np.ndarray, grid: tuple[int, ...], wrap: tuple[bool, ...], slices: np.ndarray
) -> dict[str, AxisWiring]:
    import numpy as np

    found = {}
    for axis, name in enumerate(names):
        # Each place against the next along this axis; the last against the first comes out at the end.
        apart = np.abs(places - np.roll(places, -1, axis=axis))
        for dim, size in enumerate(grid):
            if wrap[dim]:
                apart[..., dim] = np.minimum(apart[..., dim], size - apart[..., dim])
        # The first dimension is inside of a chip, where no link is needed.
        hops = np.moveaxis(apart[..., 1:].sum(axis=-1), axis, 0)
        joined = np.moveaxis(slices == np.roll(slices, -1, axis=axis), axis, 0)
        steps = hops[:-1][joined[:-1]]
        found[name] = AxisWiring(
            size=places.shape[axis],
            max_hops=int(steps.max(initial=0)),
            mean_hops=float(steps.mean()) if steps.size else 0.0,
            closing_hops=int(hops[-1][joined[-1]].max(initial=0)),
            crosses_slices=not joined.all(),
        )
    return found
