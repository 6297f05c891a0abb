"""The two rounds that the TPU ring kernels are made of: parts that are passed on, and sums that are passed on.

Parts go straight to their place in the next device's memory. No place is written twice, so nothing is held back.

Sums arrive in one of two slots in each direction. A device adds what is its own, in place, and sends the slot on. The
sender may fill a slot again only when what was in it has left, and waits for a word of that: without it a fast device
would overwrite a slow neighbour's sums.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from capibara.kernels.ops.collective.pallas_tpu_ring import Ring, Way

SLOTS = 2


def parts_scratch(ways: Sequence[Way], devices: int) -> list[Any]:
    """Semaphores for `pass_parts`: a step's copy could overtake the one before it, so each step has its own."""
    steps = (len(ways), devices - 1)
    return [pltpu.SemaphoreType.DMA(steps), pltpu.SemaphoreType.DMA(steps)]


def pass_parts(
    ring: Ring,
    ways: Sequence[Way],
    x_ref: Any,
    gathered_ref: Any,
    scratch: Sequence[Any],
    work: Callable[[Way, Any, Any], None],
) -> None:
    """Every device's x [rows, columns] into its place of gathered [devices, rows, columns], but for this one's own.

    `work(way, place, rows)` is called for the rows of each device that travel that way, this one's first, as soon as
    they are here and on their way to the next device.
    """
    sent, arrived = scratch

    def rows_of(way: Way, step: Any) -> Any:
        return gathered_ref.at[ring.place(-way.step * step), pl.ds(way.start, way.rows)]

    def copy(way: Way, step: Any, source: Any) -> Any:
        return pltpu.make_async_remote_copy(
            source,
            rows_of(way, step),
            sent.at[way.number, step],
            arrived.at[way.number, step],
            device_id=ring.device_id(way.step),
        )

    own = {way: x_ref.at[pl.ds(way.start, way.rows)] for way in ways}
    for way in ways:
        copy(way, 0, own[way]).start()
    for way in ways:
        work(way, ring.index, own[way])

    def pass_on(step: Any, carry: None) -> None:
        for way in ways:
            here = rows_of(way, step)
            copy(way, step - 1, here).wait_recv()  # all copies are of one size, whichever place they fill

            @pl.when(step < ring.devices - 1)
            def _(way: Way = way, here: Any = here) -> None:
                copy(way, step, here).start()

        for way in ways:
            work(way, ring.place(-way.step * step), rows_of(way, step))

    lax.fori_loop(1, ring.devices, pass_on, None)

    def all_gone(step: Any, carry: None) -> None:
        for way in ways:
            copy(way, step, own[way]).wait_send()

    lax.fori_loop(0, ring.devices - 1, all_gone, None)


def sums_scratch(ways: Sequence[Way]) -> list[Any]:
    """Semaphores for `pass_sums`."""
    turns = (len(ways), SLOTS)
    return [
        pltpu.SemaphoreType.DMA(turns),
        pltpu.SemaphoreType.DMA(turns),
        pltpu.SemaphoreType.REGULAR((len(ways),)),
    ]


def pass_sums(
    ring: Ring,
    ways: Sequence[Way],
    slot_ref: Any,
    scratch: Sequence[Any],
    first: Callable[[Way, Any], Any],
    add: Callable[[Way, Any, Any, Any], None],
    out_ref: Any,
) -> None:
    """This device's part of the sum over all devices into out [rows, columns].

    `first(way, place)` gives what this device has for that place, where it lies in HBM. `add(way, place, sums, target)`
    adds what it has for the place to the sums that arrived; the target may be the sums. While one way's sums are added
    the other's are under way.
    """
    sent, arrived, free = scratch

    def place(way: Way, step: Any) -> Any:
        return ring.place(-way.step * (step + 1))

    def slot(way: Way, step: Any) -> Any:
        """Where the sums of this step arrived: they were sent in the step before."""
        return slot_ref.at[way.number, lax.rem(step + 1, jnp.int32(SLOTS))]

    def send(way: Way, step: Any, source: Any) -> Any:
        turn = lax.rem(step, jnp.int32(SLOTS))
        return pltpu.make_async_remote_copy(
            source,
            slot_ref.at[way.number, turn],
            sent.at[way.number, turn],
            arrived.at[way.number, turn],
            device_id=ring.device_id(way.step),
        )

    start = jnp.int32(0)
    for way in ways:
        send(way, start, first(way, place(way, start))).start()

    def pass_on(step: Any, carry: None) -> None:
        for way in ways:
            here = slot(way, step)
            send(way, step - 1, here).wait_recv()
            add(way, place(way, step), here, here)
            send(way, step - 1, here).wait_send()

            @pl.when(step >= SLOTS)
            def _(way: Way = way) -> None:
                # Said before it is waited for, so that devices that wait for each other all go on.
                say_free(ring, way, free)
                wait_free(way, free)

            send(way, step, here).start()

    lax.fori_loop(jnp.int32(1), jnp.int32(ring.devices - 1), pass_on, None)
    last = jnp.int32(ring.devices - 1)
    for way in ways:
        send(way, last - 1, slot(way, last)).wait_recv()
        add(way, place(way, last), slot(way, last), out_ref.at[pl.ds(way.start, way.rows)])
        send(way, last - 1, slot(way, last)).wait_send()


def say_free(ring: Ring, way: Way, free: Any) -> None:
    """To the sender: what was in the slot that you fill next has left."""
    pl.semaphore_signal(free.at[way.number], 1, device_id=ring.device_id(-way.step))


def wait_free(way: Way, free: Any) -> None:
    pl.semaphore_wait(free.at[way.number], 1)
