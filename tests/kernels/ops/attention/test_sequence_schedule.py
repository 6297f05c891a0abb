"""What the ring computes where, as counted and drawn before anything runs; and the zigzag order."""

from __future__ import annotations

import doctest
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from capibara.kernels import ring_load, unzigzag, zigzag
from capibara.kernels.ops.attention.masking import by_position
from capibara.kernels.ops.attention.sequence import order as orders
from capibara.kernels.ops.attention.sequence import schedule as schedules

RULES = [
    (False, None), (True, None), (True, (5, 0)), (True, (None, 3)), (False, (9, 3)), (False, (0, 0)),
    (False, (None, 2)), (False, (3, None)), (False, (100, None)), (True, (100, 100)), (False, (7, 20)),
]  # fmt: skip


@pytest.mark.quick
@pytest.mark.parametrize("order", schedules.ORDERS)
@pytest.mark.parametrize(("causal", "window"), RULES)
def test_the_pieces_are_the_mask(causal: bool, window: Any, order: str) -> None:
    """Each pair that the rules allow is computed once, by the device that has the query, and no other pair is."""
    for devices, local in ((1, 4), (2, 6), (3, 4), (4, 8), (5, 2), (8, 4)):
        length = devices * local
        plan = schedules.schedule(length, devices, order, None, causal, window)
        assert plan.steps[0].shift == 0
        positions = np.arange(length)
        held = (zigzag(positions, devices, 0) if plan.order == "zigzag" else positions).reshape(devices, local)
        times = np.zeros((length, length), int)
        for step in plan.steps:
            for device in range(devices):
                piece = step.piece(device)
                if piece is None:
                    continue
                rows = held[device][slice(*piece.rows)]
                columns = held[(device - step.shift) % devices][slice(*piece.columns)]
                i, j = np.ogrid[: len(rows), : len(columns)]
                allowed = by_position(i, j, piece.causal, piece.q_offset, piece.window)
                times[np.ix_(rows, columns)] += 1 if allowed is None else allowed.astype(int)
        wanted = by_position(positions[:, None], positions[None, :], causal, 0, window)
        np.testing.assert_array_equal(times, 1 if wanted is None else wanted.astype(int))


@pytest.mark.quick
@pytest.mark.parametrize("devices", [4, 8, 32])
def test_zigzag_gives_every_device_the_same_work_at_every_step(devices: int) -> None:
    length = 64 * devices
    for order, balance in (("zigzag", None), ("contiguous", None), ("contiguous", True)):
        load = ring_load(length, devices, order=order, balance=balance, causal=True)
        assert load.sum() == length * (length + 1) // 2
        assert (load.max(0) / load.mean(0)).max() <= 1.1, "a step waits for its slowest device"
    unbalanced = ring_load(length, devices, causal=True, balance=False)
    assert unbalanced.sum() == load.sum()
    # The last device always has a whole block: twice the work of the balanced ring, as n grows.
    assert unbalanced.max(0).sum() > 1.7 * load.max(0).sum()


@pytest.mark.quick
def test_a_window_makes_few_steps() -> None:
    load = ring_load(1024, 8, causal=True, window=200)
    assert load.shape == (8, 3), "200 keys back of 128 a device: own, the device before, and the one before that"
    assert len(set(load.sum(1)[2:].tolist())) == 1, "only the devices within the window's reach of the start have less"
    both = ring_load(1024, 8, window=(100, 200))
    assert both.shape == (8, 4), "own keys, one device before, two after"
    assert ring_load(1024, 8, window=(2000, 2000)).shape == (8, 8)


def test_equal_steps_are_found_for_a_loop() -> None:
    causal = schedules.schedule(64, 8, "zigzag", None, True, None)
    assert [causal.run_from(i) for i in (0, 1, 7)] == [1, 7, 1]
    assert schedules.schedule(64, 8, "contiguous", None, False, None).run_from(0) == 8
    window = schedules.schedule(64, 8, "contiguous", None, False, (8, 8))
    assert [step.shift for step in window.steps] == [0, 1, 7]
    assert [window.hop(i) for i in range(3)] == [1, 6, 0]
    assert window.run_from(0) == 1


def test_the_backward_ring_turns_the_other_way() -> None:
    forward = schedules.schedule(64, 8, "zigzag", None, True, None)
    assert [step.shift for step in forward.backward.steps] == [0, 7, 6, 5, 4, 3, 2, 1]
    assert {forward.backward.hop(i) for i in range(7)} == {7}
    assert forward.backward.run_from(1) == 7
    assert set(forward.backward.steps) == set(forward.steps)


@pytest.mark.parametrize("devices", [1, 4, 5])
def test_halves_exchanged_are_the_zigzag_order(devices: int) -> None:
    mesh = jax.make_mesh((devices,), ("seq",), axis_types=(AxisType.Auto,), devices=jax.devices()[:devices])
    x = np.arange(2 * 3 * devices * 4 * 2).reshape(2, 3, devices * 4, 2)
    ids = np.arange(2 * devices * 4).reshape(2, devices * 4)
    specs = (P(None, None, "seq"), P(None, "seq"))

    def mapped(exchange: Any) -> Any:
        local = functools.partial(exchange, axis="seq", devices=devices)
        return jax.jit(jax.shard_map(lambda *xs: local(xs), mesh=mesh, in_specs=specs, out_specs=specs))

    made = mapped(orders.to_zigzag)(x, ids)
    np.testing.assert_array_equal(made[0], zigzag(x, devices, 2))
    np.testing.assert_array_equal(made[1], zigzag(ids, devices, -1))
    back = mapped(orders.from_zigzag)(*made)
    np.testing.assert_array_equal(back[0], x)
    np.testing.assert_array_equal(back[1], ids)


@pytest.mark.quick
def test_zigzag_and_back() -> None:
    x = np.arange(24).reshape(2, 12)
    assert isinstance(zigzag(x, 3, 1), np.ndarray)
    assert zigzag(x, 3, 1)[0].tolist() == [0, 1, 10, 11, 2, 3, 8, 9, 4, 5, 6, 7]
    made = jax.jit(lambda x: zigzag(x, 3, -1))(jnp.asarray(x))
    np.testing.assert_array_equal(made, zigzag(x, 3, 1))
    np.testing.assert_array_equal(unzigzag(zigzag(x, 3, 1), 3, 1), x)
    with pytest.raises(ValueError, match="pad to 16"):
        zigzag(x, 4, 1)
    with pytest.raises(ValueError, match="1 device or more"):
        zigzag(x, 0, 1)
    with pytest.raises(ValueError, match="one of the array's 2"):
        unzigzag(x, 3, 2)


@pytest.mark.parametrize("module", [orders, schedules])
def test_the_examples_in_the_documentation(module: Any) -> None:
    result = doctest.testmod(module)
    assert result.attempted
    assert not result.failed


def test_balance_is_refused_where_it_means_nothing() -> None:
    with pytest.raises(ValueError, match="leave balance at None"):
        ring_load(64, 4, balance=True)
    with pytest.raises(ValueError, match="leave balance at None"):
        ring_load(64, 4, balance=True, causal=True, window=8)
    with pytest.raises(ValueError, match="zigzag order are balanced"):
        ring_load(64, 4, balance=False, causal=True, order="zigzag")
    with pytest.raises(ValueError, match="a multiple of 8, or pass balance=False"):
        ring_load(20, 4, balance=True, causal=True)
    odd = ring_load(20, 4, causal=True)
    np.testing.assert_array_equal(odd, ring_load(20, 4, causal=True, balance=False))
    with pytest.raises(ValueError, match="pad to 24"):
        ring_load(20, 4, causal=True, order="zigzag")
    with pytest.raises(ValueError, match="Unknown order"):
        ring_load(64, 4, order="striped")
