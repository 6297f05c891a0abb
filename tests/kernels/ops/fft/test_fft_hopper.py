"""The Hopper kernels of the family, emulated by JAX: their arithmetic and their synchronisation."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from capibara.kernels.ops.fft.filter.hopper import forward as filter_hopper
from capibara.kernels.ops.fft.filter.reference import reference
from capibara.kernels.ops.fft.hopper.forward import one_pass
from capibara.kernels.ops.fft.rules import tolerance_of

pytestmark = [
    pytest.mark.quick,
    pytest.mark.skipif(jax.__version_info__ < (0, 12), reason="JAX emulates these kernels from 0.12 on"),
]


def _emulated(kernel: Any) -> Any:
    from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call
    from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams, force_gpu_interpret_mode

    with force_gpu_interpret_mode(InterpretGPUParams(detect_races=True)):
        made = jax.block_until_ready(kernel())
    assert not interpret_pallas_call.get_races().races_found, "unsynchronised accesses"
    return np.asarray(made[0], "float32") + 1j * np.asarray(made[1], "float32")


def _error(got: Any, wanted: Any) -> float:
    return float(np.linalg.norm(got - wanted) / np.linalg.norm(wanted))


@pytest.mark.parametrize(("n", "signals", "kind"), [(4096, 5, "float32"), (1024, 12, "bfloat16"), (512, 8, "bfloat16")])
def test_one_pass(n: int, signals: int, kind: str) -> None:
    """Three tiles or two for two warpgroups, one signal a tile or several, both types of operand and result."""
    re, im = jnp.asarray(np.random.default_rng(n).standard_normal((2, signals, n)), kind)
    got = _emulated(lambda: one_pass(re, im, programs=1, inverse=True, scale=0.5, dtype=kind))
    wanted = np.fft.ifft(np.asarray(re, "float64") + 1j * np.asarray(im, "float64"), norm="forward") * 0.5
    # In norm; the other half is for the worst point. A result in bfloat16 is rounded once more.
    rounding = 2**-9 if kind == "bfloat16" else 0
    assert _error(got, wanted) < tolerance_of((n,), "bfloat16") / 2 + rounding


@pytest.mark.parametrize(("n", "time", "conjugate"), [(4096, 2000, True), (8192, 5000, False)])
def test_filter(n: int, time: int, conjugate: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A length in one tile and one in two, signals that end inside a tile, three channels for two warpgroups."""
    monkeypatch.setattr(filter_hopper, "multiprocessors", lambda kind: 1)
    draw = np.random.default_rng(n)
    z = jnp.asarray(draw.standard_normal((2, 1, 3, time)), jnp.float32)
    h = jnp.asarray(draw.standard_normal((2, 3, n)), jnp.float32)
    how = {"conjugate": conjugate, "precision": "bfloat16"}
    got = _emulated(lambda: filter_hopper.fft_filter_hopper(*z, *h, config=filter_hopper.ProgramsConfig(), **how))
    wanted = reference(*z, *h, **how)
    assert _error(got, np.asarray(wanted[0]) + 1j * np.asarray(wanted[1])) < 3 * tolerance_of((n,), "bfloat16") / 2
