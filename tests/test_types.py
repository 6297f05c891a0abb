"""What mypy makes of the public functions; `tests/shapes.py` checks the shapes in their signatures."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_public_functions_have_exact_types() -> None:
    snippet = ROOT / "tests" / "typing" / "public_functions.py"
    ran = subprocess.run(
        [sys.executable, "-m", "mypy", str(snippet)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
