"""The Hopper kernels of the selective scan, emulated: their arithmetic and the synchronisation of their rings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from capibara.kernels import target
from capibara.kernels.core.spec import Case
from capibara.kernels.lab.check import check_output, expected
from capibara.kernels.ops.scan import SELECTIVE_SCAN
from capibara.kernels.ops.scan.selective.api import SELECTIVE_SCAN_GRAD
from capibara.kernels.ops.scan.selective.cases import ALL, grad_case, make_case
from capibara.kernels.ops.scan.selective.hopper import backward, forward
from capibara.kernels.ops.scan.selective.hopper.backward import OWN_STATES, ChunkConfig, candidates, selective_backward
from capibara.kernels.ops.scan.selective.hopper.forward import TimeConfig, selective_forward, softplus

NONE: frozenset[str] = frozenset()
CASES = [
    # A tile and a piece of another, an odd N, every operand; whole tiles, more than the ring holds; less than a tile.
    (make_case("all", 1, 11, 128, 3, NONE, dtype="float32", **ALL), TimeConfig(8, 2, 2)),
    (make_case("ring", 1, 16, 256, 4, NONE, D=False), TimeConfig(4, 2, 1)),
    (make_case("short", 2, 3, 128, 4, NONE, z=True), TimeConfig(8, 3, 4)),
    (make_case("segments", 2, 24, 128, 3, NONE, dtype="float32", **ALL), TimeConfig(4, 2, 2, 3)),
]


@pytest.mark.quick
@pytest.mark.skipif(jax.__version_info__ < (0, 12), reason="JAX emulates these kernels from 0.12 on")
@pytest.mark.parametrize(("case", "config"), CASES, ids=lambda given: getattr(given, "name", ""))
def test_emulated(case: Case, config: TimeConfig) -> None:
    from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call
    from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams, force_gpu_interpret_mode

    arrays = case.arrays()
    with force_gpu_interpret_mode(InterpretGPUParams(detect_races=True)):
        params = {**SELECTIVE_SCAN.params, **case.params}
        out = jax.block_until_ready(selective_forward(*arrays, config=config, **params))
    result = check_output(out, expected(SELECTIVE_SCAN, arrays, case.params))
    assert result.ok, result.why
    assert not interpret_pallas_call.get_races().races_found, "unsynchronised accesses"


@pytest.mark.quick
@pytest.mark.parametrize(("channels", "copies"), [(128, [3, 8]), (256, [8])])
def test_the_last_tile_of_a_sequence_leaves_the_next_one_alone(
    channels: int, copies: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """128 channels are all that a row has: their copy would not end with the sequence; see `write_rows`."""
    copied = set()

    def noted(source: Any, place: Any, **more: Any) -> None:
        copied.add(source.shape[0])
        copy(source, place, **more)

    copy = forward.plgpu.copy_smem_to_gmem
    monkeypatch.setattr(forward.plgpu, "copy_smem_to_gmem", noted)
    case = make_case("rest", 2, 11, channels, 4, NONE, D=False)
    with target("gpu", "NVIDIA H200"):
        params = {**SELECTIVE_SCAN.params, **case.params}
        jax.make_jaxpr(lambda *a: selective_forward(*a, config=TimeConfig(8, 2, 2), **params))(*case.args())
    assert sorted(copied) == copies


@pytest.mark.quick
@pytest.mark.parametrize(
    ("batch", "time", "channels", "segments"),
    [
        (1, 8192, 1536, 16), (1, 4096, 8192, 4), (3, 1024, 8192, 1), (1, 2047, 1536, 1), (1, 512, 256, 4),
        (1, 3300, 1536, 22),
    ],
)  # fmt: skip
def test_time_is_cut_where_channels_leave_the_chip_idle(batch: int, time: int, channels: int, segments: int) -> None:
    case = make_case("own", batch, time, channels, 16, NONE)
    with target("gpu", "NVIDIA H200"):
        first = forward.candidates(SELECTIVE_SCAN.call(*case.args(), **case.params))[0]
    assert first == TimeConfig(32, 3, 4, segments)


def test_segments_divide_time() -> None:
    arrays = make_case("own", 1, 10, 128, 4, NONE).arrays()
    with pytest.raises(ValueError, match="segments divides time"):
        selective_forward(*arrays, config=TimeConfig(4, 2, 1, 3), dt_softplus=False, return_final_state=False)


def test_softplus_is_exact_where_it_is_small() -> None:
    v = np.concatenate([np.linspace(-30, 30, 4001), [-80.0, 0.0, 80.0]]).astype(np.float32)
    wanted = np.logaddexp(0, v.astype(np.float64))
    # A few units of float32, relative to a result that may be as small as 1e-35.
    np.testing.assert_allclose(softplus(v), wanted, rtol=3e-6)


def _warp_sums(values: Sequence[Any]) -> Any:
    """What the exchange within warps gives, which nothing emulates: line i of 32 in thread i of each of four warps."""
    return jnp.stack(list(values)).reshape(32, 4, 32).sum(-1).T.reshape(128)


GRAD_CASES = [
    # A chunk and a piece of another, shared by two warpgroups, every operand; two chunks in one place, by one.
    (make_case("all", 1, 18, 128, 3, NONE, dtype="float32", **ALL), ChunkConfig(16, 4, 2, 2)),
    (make_case("ring", 1, 32, 128, 4, NONE, D=False), ChunkConfig(16, 8, 1, 1)),
]


@pytest.mark.quick
@pytest.mark.parametrize(("case", "config"), GRAD_CASES, ids=lambda given: getattr(given, "name", ""))
def test_gradient_emulated(
    case: Case, config: ChunkConfig, emulated_hopper: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backward, "warp_sums", _warp_sums)
    made = grad_case(case)
    params = {**SELECTIVE_SCAN_GRAD.params, **made.params}
    out = emulated_hopper(selective_backward, *made.arrays(), config=config, **params)
    result = check_output(out, expected(SELECTIVE_SCAN_GRAD, made.arrays(), made.params))
    assert result.ok, result.why


@pytest.mark.parametrize(
    ("numbers", "words"), [((24, 4, 2, 2), "steps is a multiple of 16"), ((32, 4, 2, 3), "warpgroups 1, 2 or 4")]
)
def test_bad_config(numbers: tuple[int, ...], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        ChunkConfig(*numbers)


@pytest.mark.parametrize(
    ("channels", "states", "words"), [(128, 33, "N up to 32; N is 33"), (96, 16, "a multiple of that, not 96")]
)
def test_the_gradient_refuses(channels: int, states: int, words: str) -> None:
    case = grad_case(make_case("own", 1, 40, channels, states, NONE))
    with target("gpu", "NVIDIA H200"), pytest.raises(ValueError, match=words):
        jax.eval_shape(lambda *x: SELECTIVE_SCAN_GRAD(*x, implementation="hopper"), *case.args())


@pytest.mark.parametrize(("states", "least"), [(16, 2), (32, 2), (3, 5)])
def test_configs_keep_to_the_chip(states: int, least: int) -> None:
    """Enough of them for float32 with every operand, where shared memory is shortest."""
    case = grad_case(make_case("own", 1, 40, 128, states, NONE, dtype="float32", **ALL))
    with target("gpu", "NVIDIA H200"):
        call = SELECTIVE_SCAN_GRAD.call(*case.args(), **case.params)
        found = candidates(call)
    assert len(found) >= least
    assert all(config.own_states(states) <= OWN_STATES for config in found)
    assert all(config.own_states(states) * config.warpgroups >= states for config in found)
