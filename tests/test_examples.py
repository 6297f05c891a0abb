"""Every example runs as a script of its own, with nothing set up for it, and says what it promises."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent / "examples"
SAYS = {
    "jax_native/bounded_einsum.py": ["bounded: 1.", "16 chunks along 'n'"],
    "jax_native/drop_in.py": ["loss ", "gemm(f32[64,256] f32[256,128]"],
    "kernels/own_op.py": ["squared_distances(", "≤ tolerance", "gradient of x: (100, 32)", "512,000 flops"],
    "kernels/own_pallas_kernel.py": [
        "≤ tolerance",
        "races: False",
        "lowered for tpu: True tpu_custom_call",
        "lowered for cuda: True mosaic_gpu_v2",
        "gradient: (300, 256)",
    ],
    "parallel/compressed_gradients.py": ["all within 1 %: True", "feedback brings what rounding loses: True"],
    "parallel/mesh_of_32.py": ["8 chips, 1 hop to the next, a ring", "by the default rules: 96 KiB of weights a chip"],
    # Trained: guessing among 64 tokens is a loss of 4.16.
    "parallel/pipeline_of_4.py": ["2 on each", "8 microbatches in 11 ticks", "step 19: loss 0.", "training: True"],
    "plan/llama.py": ["106,816 parameters, loss 6.", "-> 5.", "tokens/s"],
    "tpu_v4_optimization/matrix_products.py": ["float32: float32", "pallas_tpu TileConfig"],
    "tpu_v4_optimization/mesh_of_32.py": ["(512, 512) on 32 devices, (128, 64) on each", "actual:"],
}
EXAMPLES = sorted(path.relative_to(ROOT).as_posix() for path in ROOT.rglob("*.py"))


@pytest.mark.quick
@pytest.mark.parametrize("example", EXAMPLES)
def test_an_example_runs(example: str, as_a_reader: dict[str, str], tmp_path: Path) -> None:
    ran = subprocess.run(
        [sys.executable, str(ROOT / example)],
        env=as_a_reader,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        encoding="utf-8",
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    for words in SAYS[example]:
        assert words in ran.stdout, ran.stdout


def test_every_example_promises_something() -> None:
    assert set(SAYS) == set(EXAMPLES)
