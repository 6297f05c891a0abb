"""A function before and after its fix, traced in processes of their own."""

from __future__ import annotations

from pathlib import Path

import pytest

from capibara.migrate.verify import verify


def test_verdicts(tmp_path: Path) -> None:
    file = tmp_path / "a.py"
    shapes = [("float32", (4, 8))]
    file.write_text("import jax\nimport jax.numpy as jnp\ndef f(x):\n    return jnp.trapz(jax.tree_map(jnp.sin, x))\n")
    assert verify(file, "f", shapes).verdict == "equal"
    file.write_text("import jax\ndef f(x):\n    return jax.tree_map(no_such_name, x)\n")
    verdict = verify(file, "f", shapes)
    assert verdict.verdict == "not comparable"
    assert "no_such_name" in verdict.reason
    # What a program makes of its own text is changed by a fix.
    file.write_text(
        "import jax\nfrom pathlib import Path\n"
        "def f(x):\n    return jax.tree_map(lambda a: a * len(Path(__file__).read_text()), x)\n"
        "# jax.tree_map\nfrom jax.numpy import product\n"
    )
    assert verify(file, "f", shapes).verdict == "different"


@pytest.mark.quick
def test_nothing_to_fix_and_nothing_there(tmp_path: Path) -> None:
    file = tmp_path / "a.py"
    file.write_text("def f(x):\n    return x\n")
    assert verify(file, "f", []).reason == "there is nothing to fix"
    with pytest.raises(ValueError, match="which is not there"):
        verify(tmp_path / "gone.py", "f", [])
