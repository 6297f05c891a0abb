"""Products with a known answer on every device.

The operands are small whole numbers, which bfloat16 holds exactly, and their sums stay below 2**24, which float32
does: whatever the order of the additions, one answer is right, and every element of it is compared on the host.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from capibara.observe.health.report import Finding, NoAnswer, device_name, within

__all__ = ["Multiply", "at_work", "check_products", "multiply"]

Multiply = Callable[[Any, Any], Any]

_SIZE = {"cpu": 128}
_SIZE_OF_A_CHIP = 2048
_TYPES = ("bfloat16", "float32")
# A fault may come and go: a marginal chip fails once in a while, under load.
_ROUNDS = 3


@jax.jit
def multiply(a: Any, b: Any) -> Any:
    """The product in float32, at the operands' full precision."""
    return jnp.matmul(a, b, precision=jax.lax.Precision.HIGHEST, preferred_element_type=jnp.float32)


@functools.lru_cache(maxsize=4)
def _known(size: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Two operands and their product, by whole numbers on the host."""
    draw = np.random.default_rng(0)
    a, b = draw.integers(-2, 3, (size, size)), draw.integers(-3, 4, (size, size))
    # numpy multiplies whole numbers without BLAS: slowly. In float64 these are exact as well.
    return a, b, (a.astype(np.float64) @ b.astype(np.float64)).astype(np.float32)


def _operands(device: Any, dtype: str) -> tuple[Any, Any]:
    a, b, _ = _known(_SIZE.get(device.platform, _SIZE_OF_A_CHIP))
    return jax.device_put(jnp.asarray(a, dtype), device), jax.device_put(jnp.asarray(b, dtype), device)


def check_products(devices: Sequence[Any], product: Multiply = multiply, deadline_s: float = 120.0) -> list[Finding]:
    """Devices that multiply wrongly, fail or do not answer.

    Args:
      devices: of this process.
      product: what multiplies, of two operands that lie on the device.
      deadline_s: seconds that one device gets.
    """
    found = []
    for device in devices:
        try:
            finding = within(deadline_s, functools.partial(_check, device, product))
        except NoAnswer as silent:
            finding = _silent(device, f"gave {silent} to a matrix product", answered=False)
        except Exception as error:  # noqa: BLE001  # whatever a device raises at a product, it is not well
            text = f"failed at a matrix product: {type(error).__name__}: {_short(error)}"
            finding = _silent(device, text, answered=True)
        if finding is not None:
            found.append(finding)
    return found


def _check(device: Any, product: Multiply) -> Finding | None:
    for dtype in _TYPES:
        a, b = _operands(device, dtype)
        right = _known(a.shape[0])[2]
        for _ in range(_ROUNDS):
            got = np.asarray(product(a, b))
            wrong = np.argwhere(got != right)
            if wrong.size:
                row, column = (int(place) for place in wrong[0])
                return Finding(
                    "matmul",
                    f"device {device.id}",
                    f"{device_name(device)} multiplies wrongly: {len(wrong):,} of {right.size:,} elements of a "
                    f"{dtype} product, first [{row}, {column}], which is {got[row, column]:g} and not "
                    f"{right[row, column]:g}",
                    "leave this chip out, and have its host replaced: what it computes cannot be trusted",
                    evidence={"dtype": dtype, "wrong": len(wrong), "first": [row, column]},
                )
    return None


def _silent(device: Any, what: str, *, answered: bool) -> Finding:
    return Finding(
        "matmul",
        f"device {device.id}",
        f"{device_name(device)} {what}",
        "end other processes that hold it; if that changes nothing, restart or replace its host",
        evidence={"answered": answered},
    )


def _short(error: BaseException) -> str:
    return " ".join(str(error).split())[:300]


@contextlib.contextmanager
def at_work(devices: Sequence[Any], product: Multiply = multiply) -> Iterator[None]:
    """Inside, the devices multiply: clocks and temperatures of idle ones say nothing."""
    ended = threading.Event()

    def work() -> None:
        operands = [_operands(device, "bfloat16") for device in devices]
        while not ended.is_set():
            jax.block_until_ready([product(a, b) for a, b in operands])

    thread = threading.Thread(target=work, name="health load", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(10.0)
