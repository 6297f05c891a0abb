"""A function before and after its fix, traced in processes of their own."""

from __future__ import annotations

from pathlib import Path

import pytest

from capibara.migrate.verify import verify


@pytest.mark.quick
def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="which is not there"):
        verify(tmp_path / "gone.py", "f", [])


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


def test_nothing_to_fix_is_traced_all_the_same(tmp_path: Path) -> None:
    file = tmp_path / "a.py"
    file.write_text("def f(x):\n    return x\n")
    verdict = verify(file, "f", [("float32", (4,))])
    assert (verdict.verdict, verdict.reason) == ("equal", "there is nothing to fix")
    assert "f32[4]" in verdict.old
    for function, shapes, why in [("g", [], "it has no g"), ("f", [], "missing 1 required")]:
        verdict = verify(file, function, shapes)
        assert verdict.verdict == "not comparable"
        assert why in verdict.reason
