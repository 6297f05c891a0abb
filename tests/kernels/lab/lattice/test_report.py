"""What rows come to, and the file that they accumulate in."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from capibara.kernels.lab.lattice.report import Results, summary


def _row(family: str = "norm", held_back: bool = False, peer: float | None = 1.0, own: float = 1.0) -> dict[str, Any]:
    return {"family": family, "held_back": held_back, "against_best_peer": peer, "against_own_best": own}


@pytest.mark.quick
def test_summary() -> None:
    rows = [_row(peer=0.5), _row(peer=2.0, own=0.9), _row(held_back=True, peer=None), _row("gemm", peer=0.98)]
    rows += [{"family": "gemm", "held_back": False, "failed": "no memory"}, {"family": "none", "failed": "ended"}]
    gemm, norm, apart = summary(rows)
    assert (gemm.family, gemm.rows, gemm.failed, gemm.short) == ("gemm", 1, 1, 0)
    assert (norm.mean, norm.worst, norm.short, norm.own_worst) == (pytest.approx(1.0), 0.5, 1, 0.9)
    assert (apart.held_back, apart.mean, apart.own) == (True, None, 1.0)


@pytest.mark.quick
def test_rows_of_several_runs_accumulate_with_commit_and_seed(tmp_path: Path) -> None:
    path = tmp_path / "there" / "rows.json"
    for seed, commit in ((0, "abc"), (5, "def")):
        kept = Results(path, "NVIDIA H200", "capibara kernels bench --models", seed, commit)
        kept.add(_row())
        kept.add(_row("gemm"))
        assert [row["run"] for row in kept.rows] == [kept.number] * 2
    document = json.loads(path.read_text())
    assert [(run["seed"], run["commit"]) for run in document["runs"]] == [(0, "abc"), (5, "def")]
    assert {"date", "command", "versions"} <= set(document["runs"][0])
    assert [row["run"] for row in document["rows"]] == [0, 0, 1, 1]
    assert [p.name for p in path.parent.iterdir()] == ["rows.json"]


def test_another_device_or_another_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    Results(path, "NVIDIA H200", "", 0).add(_row())
    with pytest.raises(ValueError, match="rows of one kind of device"):
        Results(path, "NVIDIA H100", "", 0)
    path.write_text(json.dumps({"rows": []}))
    with pytest.raises(ValueError, match="a file that such a run has made"):
        Results(path, "NVIDIA H200", "", 0)
