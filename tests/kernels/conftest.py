"""What tests of kernels share: an order that lets them share programs, and Hopper kernels emulated by JAX itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """All that every op must pass, op by op and case by case.

    Tests of one case then follow each other, on one of several workers, where what is right and what is compiled for it
    is still at hand.
    """
    places = [i for i, item in enumerate(items) if item.path.name == "test_every_op.py" and hasattr(item, "callspec")]

    def of_a_case(place: int) -> tuple[int, str]:
        given = items[place].callspec.params  # type: ignore[attr-defined]
        return ops.index(given["op"].name), given["case"].name if "case" in given else ""

    ops = list(dict.fromkeys(items[i].callspec.params["op"].name for i in places))  # type: ignore[attr-defined]
    for place, item in zip(places, [items[i] for i in sorted(places, key=of_a_case)], strict=True):
        items[place] = item


@pytest.fixture
def emulated_hopper() -> Callable[..., Any]:
    """`emulated_hopper(kernel, *args, **kwargs)`: what the Mosaic GPU kernel returns, by JAX's emulation on the CPU.

    Accesses of threads that are not synchronised fail the test.
    """
    if jax.__version_info__ < (0, 12):
        pytest.skip("JAX emulates these kernels from 0.12 on")
    from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call
    from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams, force_gpu_interpret_mode

    def emulated(kernel: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with force_gpu_interpret_mode(InterpretGPUParams(detect_races=True)):
            out = jax.block_until_ready(kernel(*args, **kwargs))
        assert not interpret_pallas_call.get_races().races_found, "unsynchronised accesses"
        return out

    return emulated
