"""xmap as nested vmap: named axes, collectives over them, and where they lie on a mesh."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

import capibara.jax
from capibara.dropin.xmap import xmap

X = np.arange(24.0, dtype=np.float32).reshape(2, 3, 4)


@pytest.mark.quick
def test_names_in_order_and_collectives_over_them() -> None:
    def centred(row: Any) -> tuple[Any, Any]:
        assert row.shape == (4,)
        return row - jax.lax.pmean(row, "y"), jax.lax.axis_index("x")

    both = xmap(centred, in_axes=["x", "y", ...], out_axes=(["x", "y", ...], ["x", ...]))
    values, index = both(X)
    np.testing.assert_allclose(values, X - X.mean(1, keepdims=True), rtol=1e-6)
    assert index.tolist() == [0, 1]


def test_dimensions_by_number_come_out_where_they_are_wanted() -> None:
    twice = xmap(lambda x, y: x[:, None] * y, in_axes=({2: "b", 0: "a"}, {0: "a"}), out_axes={1: "a", 2: "b"})
    y = np.arange(10.0, dtype=np.float32).reshape(2, 5)
    np.testing.assert_allclose(twice(X, y), np.einsum("acb,ad->cabd", X, y))


def test_sizes_of_names_that_no_argument_has_and_trees() -> None:
    made = xmap(
        lambda tree: {"sum": tree["a"] + jax.lax.psum(1, "copies")},
        in_axes={0: "x"},
        out_axes={"sum": {0: "copies", 1: "x"}},
        axis_sizes={"copies": 3},
    )
    np.testing.assert_allclose(made({"a": X})["sum"], np.broadcast_to(X + 3, (3, 2, 3, 4)))


def test_resources_say_where_an_axis_lies() -> None:
    mesh = Mesh(np.array(jax.devices()[:2]), ("d",))
    shifted = xmap(
        lambda x: jax.lax.ppermute(x, "x", [(0, 1), (1, 0)]),
        in_axes=["x", ...],
        out_axes=["x", ...],
        axis_resources={"x": "d"},
    )
    with pytest.warns(DeprecationWarning, match="with mesh:"):
        found = mesh(shifted)(X)
    np.testing.assert_allclose(found, X[::-1])
    assert found.sharding.spec == PartitionSpec("d")
    assert shifted(X).sharding.num_devices == 1  # outside of the mesh it is another program


def test_donation_and_refusals() -> None:
    x = jnp.ones((2, 3))
    xmap(lambda x: x + 1, ["x", ...], ["x", ...], donate_argnums=0)(x)
    assert x.is_deleted()
    with pytest.raises(ValueError, match=r"names with \.\.\. behind them"):
        xmap(abs, "x", ["x", ...])(X)
    with pytest.raises(ValueError, match="count from the first"):
        xmap(abs, {-1: "x"}, {0: "x"})(X)
    with pytest.raises(ValueError, match="in_axes of xmap has the structure"):
        xmap(abs, ({0: "x"}, {0: "x"}), {0: "x"})(X)
    with pytest.raises(ValueError, match="axes of a mesh"):
        xmap(abs, {0: "x"}, {0: "x"}, axis_resources={"x": object()})
    with pytest.raises(RuntimeError, match="no_such_backend"):
        xmap(abs, {0: "x"}, {0: "x"}, backend="no_such_backend")(X)


@pytest.mark.usefixtures("nothing_said_yet")
def test_the_drop_in_has_it() -> None:
    with pytest.warns(DeprecationWarning, match="jax.experimental.maps.xmap is gone"):
        assert capibara.jax.experimental.maps.xmap is xmap
