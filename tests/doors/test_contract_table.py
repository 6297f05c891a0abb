"""The table of documented names is current, and the tool that writes it tells there from not there."""

from __future__ import annotations

import functools
import importlib.util
import os
import sys
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


def _load_tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("contract_table", ROOT / "tools" / "contract_table.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


tool = _load_tool()


# What the tool is pointed at below.
def plain(a: int, *, b: int = 0) -> None: ...
def catch_all(a: int, **kwargs: int) -> None: ...
def positional(a: int, /, b: int) -> None: ...


def passing_on(f: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(f)
    def wrapper(*args: Any, **kwargs: Any) -> None:
        return f(*args, **kwargs)

    return wrapper


def closing_off(f: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(f)
    def wrapper(a: int) -> None:
        return f(a)

    return wrapper


@passing_on
def decorated(a: int, b: int) -> None: ...


@closing_off
def narrowed(a: int, b: int = 0) -> None: ...


@dataclass(frozen=True)
class Result:
    good: bool
    notes: list[str]


class Thing:
    slot: int

    def __init__(self, size: int, shape: tuple[int, ...] = ()) -> None:
        self.made = size

    def method(self, x: int) -> Result:
        return Result(True, [])

    @classmethod
    def build(cls, path: str) -> Thing:
        return cls(1)

    @property
    def view(self) -> Result:
        return Result(True, [])


class Empty:
    inner = Result(True, [])


def state_of(path: str, keywords: tuple[str, ...] = (), gives: tuple[str, ...] = ()) -> str:
    return str(tool.state(tool.Entry(issue="test", path=path, keywords=keywords, gives=gives)))


HERE = __name__


CALLS = tool.load_calls(tool.CALLS)
# Half of what all calls take. The quick run has what they call elsewhere: tests/cli/test_train.py,
# tests/train/test_trainer.py, tests/models, test_pipeline.py and test_latency.py of tests/serve, tests/observe/health.
LONG = ("commands", "distributed_training", "model_in_use", "inference_within_a_latency", "health_of_the_devices")


@pytest.mark.parametrize(
    "call",
    [pytest.param(call, id=call.__name__, marks=() if call.__name__ in LONG else pytest.mark.quick) for call in CALLS],
)
def test_a_documented_call_runs(call: Callable[[], None]) -> None:
    assert tool.run_call(call) is None


@pytest.mark.quick
def test_the_table_is_current() -> None:
    """The table as it is where every call runs; that each does is the test above."""
    shown = {path: tool.Shown(call, None) for call, paths in CALLS.items() for path in paths}
    changes = tool.difference(tool.render(tool.load(tool.DATA.read_text(encoding="utf-8")), shown))
    assert changes == "", "run: python tools/contract_table.py"


def calls_of(folder: Path, body: str, paths: tuple[str, ...] = ("capibara.errors:rule_error",)) -> Path:
    """A file of one call that shows these paths."""
    path = folder / "some_calls.py"
    path.write_text(f"def call():\n    {body}\n\n\nCALLS = {{call: {paths!r}}}\n")
    return path


IMPORT = "from capibara.errors import rule_error"


@pytest.mark.quick
@pytest.mark.parametrize(
    ("body", "state"),
    [
        (f"{IMPORT}; rule_error(rule='', arrived=1, fix='')", "there"),
        (f"{IMPORT}; rule_error('', arrived=1, fix='')", "partial: its call leaves out keyword rule"),
        ("import capibara.errors", "partial: its call leaves out rule_error"),
        ("raise TypeError('a\\nb')", "partial: its call fails: TypeError: a"),
        ("assert False", "partial: its call fails: AssertionError: no text"),
    ],
)
def test_there_means_that_the_call_ran(body: str, state: str, tmp_path: Path) -> None:
    entry = tool.Entry(issue="i", path="capibara.errors:rule_error", keywords=("rule", "arrived", "fix"))
    assert tool.state(entry, shown=tool.run_calls(calls_of(tmp_path, body))) == state
    other = tool.Entry(issue="i", path="capibara.errors:TPUError")
    assert tool.state(other, shown={}) == "partial: no call of it is run"


def test_calls_tune_into_a_folder_of_their_own(tmp_path: Path) -> None:
    before, seen = os.environ["CAPIBARA_CACHE_DIR"], tmp_path / "seen"
    body = f"import os, pathlib; pathlib.Path({str(seen)!r}).write_text(os.environ['CAPIBARA_CACHE_DIR'])"
    tool.run_calls(calls_of(tmp_path, body))
    assert seen.read_text() != before
    assert not Path(seen.read_text()).exists()
    assert os.environ["CAPIBARA_CACHE_DIR"] == before


@pytest.mark.quick
def test_a_known_name_is_there() -> None:
    assert state_of("capibara.errors:rule_error", ("rule", "arrived", "fix")) == "there"
    assert state_of("capibara.hardware") == "there"


@pytest.mark.quick
@pytest.mark.parametrize(
    "wrong",
    [
        "capibara.errors:no_such_name",
        "capibara.no_such_room",
        "no_such_package:x",
        "capibara.errors:TPUError.nope",
    ],
)
def test_a_wrong_name_is_missing(wrong: str) -> None:
    assert state_of(wrong) == "missing"


@pytest.mark.quick
@pytest.mark.parametrize(
    ("name", "keywords", "state"),
    [
        ("plain", ("a", "b"), "there"),
        ("plain", ("a", "c"), "partial: lacks keyword c"),
        ("catch_all", ("a", "b"), "partial: lacks keyword b"),
        ("positional", ("b",), "there"),
        ("positional", ("a", "b"), "partial: lacks keyword a"),
        ("decorated", ("a", "b"), "there"),
        ("decorated", ("args",), "partial: lacks keyword args"),
        ("narrowed", ("a", "b"), "partial: lacks keyword b"),
        ("Thing", ("size", "shape"), "there"),
        ("Thing", ("size", "self"), "partial: lacks keyword self"),
        ("Thing.method", ("x",), "there"),
        ("Thing.build", ("path",), "there"),
        ("Thing.view", (), "there"),
        ("Thing.slot", (), "there"),
        ("Thing.made", (), "there"),
        ("Thing.absent", (), "missing"),
        ("Result", ("good", "notes"), "there"),
        ("Result.good", (), "there"),
        ("Empty().inner.good", (), "there"),
        ("Empty().inner.bad", (), "missing"),
        ("Empty.inner", ("a",), "partial: no signature to read"),
    ],
)
def test_states_come_from_the_signature(name: str, keywords: tuple[str, ...], state: str) -> None:
    assert state_of(f"{HERE}:{name}", keywords) == state


@pytest.mark.parametrize(
    ("name", "gives", "state"),
    [
        ("Thing.method", ("good", "notes"), "there"),
        ("Thing.method", ("good", "score"), "partial: lacks field score"),
        ("Thing.view", ("score",), "partial: lacks field score"),
        ("plain", ("anything",), "partial: lacks field anything"),
        ("passing_on", ("anything",), "there"),
    ],
)
def test_fields_of_an_annotated_result(name: str, gives: tuple[str, ...], state: str) -> None:
    # What returns a callable or a dict has no class to look at, and is left to the tests that call it.
    assert state_of(f"{HERE}:{name}", (), gives) == state


def test_a_module_that_does_not_import_is_missing_and_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "half_written_door.py").write_text("def f(:\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert state_of("half_written_door:f") == "missing"
    assert "half_written_door:f: SyntaxError" in capsys.readouterr().err


def test_a_folder_without_code_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "hollow_door").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    assert state_of("hollow_door") == state_of("hollow_door:__name__") == "missing"


def test_files(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "one.py").touch()
    states = [tool.state(tool.Entry(issue="x", file=name), tmp_path) for name in ("empty", "full", "full/one.py", "no")]
    assert states == ["missing", "there", "there", "missing"]


def data_with(*entries: str) -> str:
    return f'[[section]]\ntitle = "t"\nentries = [{", ".join(entries)}]'


def test_the_data_refuses_mistakes() -> None:
    with pytest.raises(TypeError, match="keyword"):
        tool.load(data_with('{ path = "a", keyword = ["x"], issue = "i" }'))
    with pytest.raises(ValueError, match="Got twice: a"):
        tool.load(data_with('{ path = "a", issue = "i" }', '{ path = "a", issue = "j" }'))
    with pytest.raises(ValueError, match="a path or a file"):
        tool.load(data_with('{ issue = "i" }'))


@pytest.mark.quick
def test_check_exits_1_with_the_difference(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    data, table = tmp_path / "contract.toml", tmp_path / "contract.md"
    data.write_text(data_with('{ path = "capibara.errors:rule_error", issue = "i" }'))
    monkeypatch.setattr(tool, "DATA", data)
    monkeypatch.setattr(tool, "TABLE", table)
    monkeypatch.setattr(
        tool, "CALLS", calls_of(tmp_path, "from capibara.errors import rule_error; rule_error('', 1, '')")
    )
    assert tool.main([]) == 0
    assert tool.main(["--check"]) == 0
    assert "1 names: 1 there, 0 partial, 0 missing." in table.read_text()
    table.write_text(table.read_text().replace("| there |", "| missing |"))
    assert tool.main(["--check"]) == 1
    out = capsys.readouterr().out
    assert "+| `capibara.errors.rule_error` |  | i | there |" in out
    assert "python tools/contract_table.py" in out


def test_the_documented_count_does_not_shrink_by_accident() -> None:
    # The contract is fixed: names may be added. This is how many there were when it was written down.
    sections = tool.load(tool.DATA.read_text(encoding="utf-8"))
    assert sum(len(one.entries) for one in sections) >= 190


def test_documented_names_are_the_documents_own() -> None:
    """They start at a door: a name that follows the code into a room is no longer what the documents say."""
    sections = tomllib.loads((ROOT / "docs" / "contract.toml").read_text(encoding="utf-8"))["section"]
    theirs = [section for section in sections if section["title"] != "Commands and names of our own"]
    paths = [entry["path"] for section in theirs for entry in section["entries"] if "path" in entry]
    doors = ("capibara.jax", "capibara.core", "capibara.config", "capibara.vq", "vishwamai")
    assert len(paths) > 200
    assert not [path for path in paths if not path.startswith(doors)]
