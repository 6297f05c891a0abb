"""Every example runs as a script, and says what it promises."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

from capibara.kernels.op import registry, unregister

ROOT = Path(__file__).parent.parent / "examples"
SAYS = {
    "jax_native/bounded_einsum.py": ["bounded: 1.", "16 chunks along 'n'"],
    "jax_native/drop_in.py": ["loss ", "gemm(f32[64,256] f32[256,128]"],
    "kernels/own_op.py": ["squared_distances(", "≤ tolerance", "gradient: (100, 32)"],
    "parallel/compressed_gradients.py": ["all within 1 %: True", "feedback brings them: True"],
    "parallel/mesh_of_32.py": ["8 chips, 1 hop to the next, a ring", "by the default rules: 96 KiB of weights a chip"],
    "parallel/pipeline_of_4.py": ["2 on each", "8 microbatches in 11 ticks", "waits for 27%", "same training: True"],
    "tpu_v4_optimization/matrix_products.py": ["float32: float32", "pallas_tpu TileConfig"],
    "tpu_v4_optimization/mesh_of_32.py": ["(512, 512) on 32 devices, (128, 64) on each", "actual:"],
}
EXAMPLES = sorted(path.relative_to(ROOT).as_posix() for path in ROOT.rglob("*.py"))


@pytest.mark.parametrize("example", EXAMPLES)
def test_an_example_runs(example: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    before = set(registry())
    monkeypatch.setattr(sys, "argv", [example])  # an example reads its own command line, not the test's
    try:
        runpy.run_path(str(ROOT / example), run_name="__main__")
    finally:
        for name in set(registry()) - before:
            unregister(name)
    printed = capsys.readouterr().out
    for words in SAYS.get(example, []):
        assert words in printed, printed


def test_what_is_promised_is_there() -> None:
    assert set(SAYS) <= set(EXAMPLES)
