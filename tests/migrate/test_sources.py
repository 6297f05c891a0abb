"""Which files are read, as which text."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from capibara.migrate import sources
from capibara.migrate.notebooks import cells_of, join, split
from capibara.migrate.sources import Unreadable, files_below, read_notebook, read_python


def _names(found: object, root: Path) -> list[str]:
    return [path.relative_to(root).as_posix() for path in found]  # type: ignore[attr-defined]


@pytest.mark.quick
def test_a_tree_is_walked_once_and_in_order(tmp_path: Path) -> None:
    for name in ("b.py", "a/c.py", "a/d.ipynb", "a/e.txt", ".venv/f.py", "build/g.py", "a/__pycache__/h.py", "i.pyi"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")
    (tmp_path / "a" / "loop").symlink_to(tmp_path)
    (tmp_path / "again.py").symlink_to(tmp_path / "b.py")
    (tmp_path / "self.py").symlink_to(tmp_path / "self.py")
    (tmp_path / "nowhere.py").symlink_to(tmp_path / "gone.py")
    os.mkfifo(tmp_path / "pipe.py")
    expected = ["again.py", "i.pyi", "nowhere.py", "self.py", "a/c.py", "a/d.ipynb"]
    assert _names(files_below([tmp_path]), tmp_path) == expected
    assert _names(files_below([tmp_path, tmp_path / "b.py"]), tmp_path) == expected
    assert _names(files_below([tmp_path / ".venv"]), tmp_path) == [".venv/f.py"]  # named itself
    assert _names(files_below([tmp_path / "a" / "e.txt"]), tmp_path) == ["a/e.txt"]
    for name in ("self.py", "nowhere.py", "pipe.py"):
        with pytest.raises(Unreadable) as refused:
            read_python(tmp_path / name)
        assert refused.value.code == "CAP903"


def test_exclusions_are_of_names_and_of_paths(tmp_path: Path) -> None:
    for name in ("a/b.py", "a/c.py", "d/b.py", "d/e/f.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")
    for exclude, left in (
        ("b.py", ["a/c.py", "d/e/f.py"]),
        ("a", ["d/b.py", "d/e/f.py"]),
        ("a/b.py", ["a/c.py", "d/b.py", "d/e/f.py"]),
        ("d/e/", ["a/b.py", "a/c.py", "d/b.py"]),
        ("d/*", ["a/b.py", "a/c.py"]),
    ):
        assert _names(files_below([tmp_path], [exclude], tmp_path), tmp_path) == left, exclude


def test_a_path_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="which is not there"):
        list(files_below([tmp_path / "no.py"]))


@pytest.mark.quick
def test_encodings(tmp_path: Path) -> None:
    file = tmp_path / "a.py"
    for data, text in (
        (b"x = 'a'\r\n", "x = 'a'\r\n"),
        ("# coding: latin-1\nx = 'ñ'\n".encode("latin-1"), "# coding: latin-1\nx = 'ñ'\n"),
        (b"\xef\xbb\xbfx = 1\n", "x = 1\n"),
    ):
        file.write_bytes(data)
        source = read_python(file)
        assert source.text == text
        assert source.encoded(text) == data
    for data, said in (
        (b"x = 1\n\ny = '\xf1'\n", "byte 0xf1 is not utf-8"),
        (b"# coding: klingon\n", "encoding is not known"),
        (b"x = '\xf1'\n", "byte 0xf1 is not utf-8"),
    ):
        file.write_bytes(data)
        with pytest.raises(Unreadable, match=said) as refused:
            read_python(file)
        assert refused.value.code == "CAP902"
        assert refused.value.line == 3 or not data.startswith(b"x = 1")


def test_a_file_that_nobody_wrote(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "LARGEST", 2**20)
    (tmp_path / "a.py").write_text("#" * (2**20 + 1))
    with pytest.raises(Unreadable, match="more than 1 MiB"):
        read_python(tmp_path / "a.py")


def _notebook(*cells: str | list[str], kind: str = "code") -> dict[str, object]:
    return {"cells": [{"cell_type": kind, "source": cell} for cell in cells], "nbformat": 4}


@pytest.mark.quick
def test_cells_are_one_module_and_come_back(tmp_path: Path) -> None:
    document = _notebook(
        ["%matplotlib inline\n", "import jax"],
        "%%bash\nls",
        "files = !ls\nif files:\n    %time f()\njax.jit?",
        "y = 3 % 2\n",
        "def (",
        "%%time\nx = 1",
    )
    (tmp_path / "a.ipynb").write_text(json.dumps(document))
    cells = cells_of(read_notebook(tmp_path / "a.ipynb")[1])
    assert [cell.number for cell in cells] == [1, 3, 4, 5, 6]
    joined, broken = join(cells)
    compile(joined.text, "a", "exec")
    assert [cell.number for cell, _ in broken] == [5]
    assert "import jax" in joined.text
    line = joined.text.split("\n").index("y = 3 % 2") + 1
    assert joined.place(line) == (4, 1)
    assert [cell for cell in cells if cell.number != 5] == list(split(joined.text))


@pytest.mark.parametrize(
    ("text", "code"), [("{", "CAP904"), ("[]", "CAP904"), ('{"worksheets": []}', "CAP904"), ("\xff", "CAP902")]
)
def test_what_is_no_notebook(tmp_path: Path, text: str, code: str) -> None:
    (tmp_path / "a.ipynb").write_bytes(text.encode("latin-1"))
    with pytest.raises(Unreadable) as refused:
        read_notebook(tmp_path / "a.ipynb")
    assert refused.value.code == code
