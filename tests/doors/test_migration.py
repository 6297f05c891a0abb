"""`capibara.jax.utils.check_migration_compatibility`, as the documents call it."""

from __future__ import annotations

from pathlib import Path

import pytest

from capibara.jax.utils import check_migration_compatibility

MODEL = """import jax
import jax.numpy as jnp

@jax.jit
def loss(x):
    print(x)
    return jnp.trapz(jax.tree_map(jnp.sin, x))
"""


@pytest.mark.quick
def test_as_documented(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mi_modelo.py").write_text(MODEL)
    compatibility = check_migration_compatibility(
        source_code="mi_modelo.py", check_imports=True, check_functions=True, check_performance=True
    )
    assert not compatibility.is_compatible
    for issue in compatibility.issues:
        print(f"   - {issue}")
    said = capsys.readouterr().out
    assert "   - mi_modelo.py:7:12: CAP203 error: jax.numpy.trapz is gone" in said
    assert {issue.file for issue in compatibility.issues} == {"mi_modelo.py"}
    for issue in compatibility.issues:
        assert issue.line
        assert issue.message
        assert issue.fix
        assert issue.severity in ("error", "warning", "info")


@pytest.mark.quick
@pytest.mark.parametrize("off", ["check_imports", "check_functions", "check_performance"])
def test_each_keyword_turns_its_findings_off(off: str) -> None:
    family = {"check_imports": "CAP1", "check_functions": "CAP2", "check_performance": "CAP3"}[off]
    everything = {issue.code[:4] for issue in check_migration_compatibility(MODEL).issues}
    assert everything == {"CAP1", "CAP2", "CAP3"}
    without = check_migration_compatibility(MODEL, **{off: False})
    assert {issue.code[:4] for issue in without.issues} == everything - {family}
    assert without.is_compatible == (off == "check_functions")


def test_a_folder_a_text_and_what_is_not_there(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(MODEL)
    (tmp_path / "b.py").write_text("def (")
    report = check_migration_compatibility(str(tmp_path))
    assert len(report.files) == 2
    assert [issue.code for issue in report.failures] == ["CAP901"]
    assert check_migration_compatibility("import jax").is_compatible
    for missing in ("gone.py", tmp_path / "gone.py"):
        with pytest.raises(ValueError, match="which is not there"):
            check_migration_compatibility(missing)
    with pytest.raises(ValueError, match="pass a str or a Path"):
        check_migration_compatibility(3)  # type: ignore[arg-type]
