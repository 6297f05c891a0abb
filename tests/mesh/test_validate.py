"""validate_sharding passes what lies as it should and shows both layouts otherwise."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from capibara.mesh.validate import validate_sharding


def mesh(*shape: int) -> Mesh:
    names = ("data", "model", "expert")[: len(shape)]
    return Mesh(np.asarray(jax.devices()[: int(np.prod(shape))]).reshape(shape), names)


def put(shape: tuple[int, ...], on: Mesh, spec: P) -> jax.Array:
    return jax.device_put(np.zeros(shape, np.float32), NamedSharding(on, spec))


@pytest.mark.quick
@pytest.mark.parametrize(
    ("shape", "sizes", "lies", "asked"),
    [
        ((8, 16), (4, 8), P("data", "model"), P("data", "model")),
        ((8, 16), (4, 8), P("data"), P("data", None)),
        ((8, 16), (4, 8), P(), None),
        ((8, 16), (4, 8), P("data", "model"), ("data", "model")),
        ((64, 16), (4, 8), P(("data", "model")), P(("data", "model"), None)),
        ((8, 16, 4), (4, 4, 2), P("data", "model", "expert"), P("data", "model", "expert")),
        ((8, 16), (32, 1), P(None, None), P(None, "model")),
        ((), (4, 8), P(), P()),
    ],
)
def test_an_equivalent_layout_passes(shape: Any, sizes: Any, lies: P, asked: Any) -> None:
    on = mesh(*sizes)
    x = put(shape, on, lies)
    assert validate_sharding(x, on, asked) is x


@pytest.mark.quick
def test_another_layout_shows_both() -> None:
    on = mesh(4, 8)
    with pytest.raises(ValueError, match="not laid out as expected") as told:
        validate_sharding(put((8, 16), on, P("model", "data")), on, P("data", "model"))
    text = str(told.value)
    assert "expected: P('data', 'model') on the mesh (data=4, model=8): 2x2 on each of 32" in text
    assert "actual:   P('model', 'data') on the mesh (data=4, model=8): 1x4 on each of 32" in text
    assert "Fix: jax.device_put" in text


def test_one_device_and_another_mesh_are_other_layouts() -> None:
    on = mesh(2, 2)
    alone = jax.device_put(jnp.zeros((8, 8)), SingleDeviceSharding(jax.devices()[0]))
    with pytest.raises(ValueError, match=r"actual: +SingleDeviceSharding.*8x8 on each of 1 device\n"):
        validate_sharding(alone, on, P())
    reordered = Mesh(np.asarray(jax.devices()[:4][::-1]).reshape(2, 2), ("data", "model"))
    with pytest.raises(ValueError, match="not laid out"):
        validate_sharding(put((8, 8), reordered, P("data")), on, P("data"))


@pytest.mark.parametrize(
    ("shape", "spec", "said"),
    [
        ((8, 8), P("dat"), "Unknown mesh axis 'dat'. Did you mean 'data'"),
        ((8, 8), P("expert"), "Choices: 'data', 'model'"),
        ((8,), P("data", "model"), r"one entry a dimension at most.*2 entries.*shape \(8,\)"),
        ((6, 8), P("data"), r"Dimension 0 divides over the 4 devices.*Got 6.*pad it to 8"),
        ((8, 8), P(("data", "model")), "divides over the 32 devices"),
        ((8, 8), ("data", "data"), "'data' twice"),
        ((8, 8), "data", "spec is a PartitionSpec"),
    ],
)
def test_a_spec_that_means_nothing_is_named(shape: tuple[int, ...], spec: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        validate_sharding(jnp.zeros(shape), mesh(4, 8), spec)


def test_only_arrays_on_a_mesh() -> None:
    on = mesh(4, 8)
    with pytest.raises(ValueError, match=r"takes a jax array.*ndarray"):
        validate_sharding(np.zeros((8, 8)), on, P())  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"mesh is a jax.sharding.Mesh.*list"):
        validate_sharding(jnp.zeros((8, 8)), [1], P())  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="an array that exists"):
        jax.jit(lambda x: validate_sharding(x, on, P()))(jnp.zeros((8, 8)))
