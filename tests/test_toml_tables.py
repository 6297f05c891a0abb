"""Tables of TOML as dataclasses: types, lines, nearest keys, overrides, and back to text."""

from __future__ import annotations

import dataclasses
import math
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from capibara.errors import parts_of
from capibara.toml_tables import Table, build, build_part, parse_override, plain, read, set_key, to_toml


@dataclasses.dataclass(frozen=True)
class Inner:
    size: int = 3
    rate: float = 0.5

    def __post_init__(self) -> None:
        if self.size < 0:
            raise ValueError(f"size is 0 or more. Got {self.size}.")


@dataclasses.dataclass(frozen=True)
class Outer:
    name: str
    count: int = 1
    rate: float = 1.0
    deep: bool = False
    cap: float | None = None
    shape: tuple[int, ...] = (1,)
    text_or_list: str | tuple[str, ...] = "x"
    table: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    sizes: Mapping[str, int] = dataclasses.field(default_factory=dict)
    inner: Inner = dataclasses.field(default_factory=Inner)
    derived: int = dataclasses.field(default=0, init=False)


FILE = """# a comment
name = "n"
count = 2e0

[inner]
size = 4  # four

[sizes]
"a b" = 1
c.d = 2
"""


def _file(folder: Path, text: str) -> Path:
    file = folder / "file.toml"
    file.write_text(text, encoding="utf-8")
    return file


@pytest.mark.quick
def test_a_table_becomes_its_dataclass() -> None:
    values = {
        "name": "n", "count": 2.0, "rate": 3, "deep": True, "cap": "none", "shape": [2, 3], "text_or_list": ["a", "b"],
        "table": {"x": [1, {"y": 2}]}, "sizes": {"a": 1}, "inner": {"rate": 1},
    }  # fmt: skip
    made = build(Outer, Table(values))
    wanted = Outer("n", 2, 3.0, True, None, (2, 3), ("a", "b"), {"x": [1, {"y": 2}]}, {"a": 1}, Inner(3, 1.0))
    assert made == wanted
    assert (type(made.count), type(made.rate), type(made.inner.rate)) == (int, float, float)
    assert build(Outer, Table({"name": "n", "cap": 2})).cap == 2.0
    assert build(Inner, Table({"a": {"b": {"size": 9}}}), "a.b") == Inner(9)
    assert build(Inner, Table({}), "not.there") == Inner()
    assert build_part(Inner, {"size": 1}, Table({}), "anywhere") == Inner(1)
    # What is built already is taken as it is.
    assert build(Outer, Table({"name": "n", "inner": Inner(7)})).inner == Inner(7)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"name": 3}, "name is text. Got 3."),
        ({"name": "n", "count": 2.5}, "count is a whole number. Got 2.5."),
        ({"name": "n", "count": True}, "count is a whole number. Got True."),
        ({"name": "n", "count": math.inf}, "count is a whole number. Got inf."),
        ({"name": "n", "count": math.nan}, "count is a whole number. Got nan."),
        ({"name": "n", "count": "2"}, "count is a whole number. Got '2'. Fix: use e.g. count = 8."),
        ({"name": "n", "rate": math.inf}, "rate is a number. Got inf."),
        ({"name": "n", "rate": math.nan}, "rate is a number. Got nan."),
        ({"name": "n", "rate": 10**400}, "rate is a number. Got 1000"),
        ({"name": "n", "rate": False}, "rate is a number. Got False."),
        ({"name": "n", "deep": 1}, "deep is true or false. Got 1."),
        ({"name": "n", "cap": "all"}, "cap is a number. Got 'all'."),
        ({"name": "n", "shape": 4}, "shape is a list. Got 4. Fix: write shape = [...]."),
        ({"name": "n", "shape": [1, "2"]}, "shape is a whole number. Got '2'."),
        ({"name": "n", "table": 4}, "table is a table of keys. Got 4. Fix: write [table]."),
        ({"name": "n", "sizes": {"a": "b"}}, "sizes.a is a whole number. Got 'b'."),
        ({"name": "n", "inner": 4}, "inner is a table of keys. Got 4. Fix: write [inner]."),
        ({"name": "n", "inner": {"siz": 4}}, "Unknown key of inner 'siz'. Did you mean 'size'?"),
        ({"name": "n", "derived": 4}, "Unknown key of the config 'derived'"),
        ({"nam": "n"}, "Unknown key of the config 'nam'. Did you mean 'name'?"),
        ({}, "The config names name. Got a table without. Fix: add name and its value."),
        ({"name": "n", "inner": {"size": -1}}, "size is 0 or more. Got -1."),
    ],
)
def test_what_is_no_such_table_is_refused(values: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError) as caught:
        build(Outer, Table(values))
    assert str(caught.value).startswith(said)


def test_a_huge_whole_number_is_one() -> None:
    assert build(Outer, Table({"name": "n", "count": 10**400})).count == 10**400


def test_places_are_lines_of_the_file(tmp_path: Path) -> None:
    file = _file(tmp_path, FILE)
    table = read(file)
    assert table.values == {"name": "n", "count": 2.0, "inner": {"size": 4}, "sizes": {"a b": 1, "c": {"d": 2}}}
    assert table.place("count") == f"{file}:3"
    assert table.place("inner") == f"{file}:5"
    assert table.place("inner.size") == f"{file}:6"
    assert table.place("sizes.c.d") == f"{file}:10"
    assert table.place("inner.other") == f"{file}:5", "the section that it would be in"
    assert table.place("sizes.c") == f"{file}:8"
    assert Table({}, {"a.b.c": "x:1"}).place("a") == "x:1", "the first key below it"
    assert table.place("nowhere") is None


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("nam = 3", r"key of the config at FILE:1 'nam'"),
        ("name = 3", r"name is text\. Got 3 at FILE:1\."),
        ("name = 'n'\n\n[inner]\nsze = 3", r"key of inner at FILE:4 'sze'\. Did you mean 'size'"),
        ("name = 'n'\ninner = {size = 'x'}", r"inner\.size is a whole number\. Got 'x' at FILE:2"),
        ("name = 'n'\ninner.size = 'x'", r"inner\.size is a whole number\. Got 'x' at FILE:2"),
        ("name = 'n'\n\n[inner]\nsize = -3", r"^FILE:3: size is 0 or more\. Got -3"),
        ("name = 'n'\nshape = [\n  [1]\n]\ncount = 'x'", r"shape is a whole number\. Got \[1\] at FILE:2"),
    ],
)
def test_errors_have_the_line(tmp_path: Path, text: str, said: str) -> None:
    file = _file(tmp_path, text)
    with pytest.raises(ValueError, match=said.replace("FILE", str(file))):
        build(Outer, read(file))


def test_an_error_of_the_class_keeps_its_parts_and_names_what_overrode(tmp_path: Path) -> None:
    from capibara.models.preset import TrainSettings

    table = set_key(read(_file(tmp_path, "[train]\nsteps = 3\n")), "train.batch_size", 0, "--set train.batch_size=0")
    with pytest.raises(ValueError, match=r"file.toml:1, --set train.batch_size=0: train.batch_size is 1") as caught:
        build(TrainSettings, table, "train")
    assert parts_of(caught.value) == {"rule": "train.batch_size is 1 or more", "got": "0", "fix": "use batch_size = 1"}


def test_what_is_no_toml_and_no_text(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"A config is TOML\. Got .*file.toml: .*line 2"):
        read(_file(tmp_path, "a = 1\nb =\n"))
    file = tmp_path / "latin.toml"
    file.write_bytes(b'name = "caf\xe9"')
    with pytest.raises(ValueError, match=r"TOML is UTF-8\. Got .*latin.toml, byte 11"):
        read(file)


@pytest.mark.parametrize(
    ("text", "key", "value"),
    [
        ("a.b=3", "a.b", 3),
        ("a = 3e-4", "a", 3e-4),
        ("a=true", "a", True),
        ("a=[1, 2]", "a", [1, 2]),
        ("a={type = 'yarn', factor = 4.0}", "a", {"type": "yarn", "factor": 4.0}),
        ("a='3'", "a", "3"),
        ("a=books/*.txt", "a", "books/*.txt"),
        ("a=x=y", "a", "x=y"),
        ("a=", "a", ""),
    ],
)
def test_overrides(text: str, key: str, value: Any) -> None:
    assert parse_override(text) == (key, value)


@pytest.mark.parametrize("text", ["steps", "=3", " = 3"])
def test_what_is_no_override(text: str) -> None:
    with pytest.raises(ValueError, match="key=value"):
        parse_override(text)


def test_a_key_laid_over_a_table_leaves_the_others() -> None:
    table = set_key(Table({"a": {"b": 1, "c": 2}}, {"a.b": "f:1", "a.c": "f:2"}), "a.b", 3, "--set")
    assert table.values == {"a": {"b": 3, "c": 2}}
    assert table.places == {"a.b": "--set", "a.c": "f:2"}
    above = Table({"a": {"b": {"deep": 1}}, "x": 1})
    below = Table({"a": {"b": 2, "c": 3}, "x": {"y": 1}})
    assert above.over(below).values == {"a": {"b": {"deep": 1}, "c": 3}, "x": 1}
    assert below.values == {"a": {"b": 2, "c": 3}, "x": {"y": 1}}, "neither is changed"


_TEXT = st.text(st.characters(exclude_categories=("Cs",)), max_size=8)
_SCALAR = st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False) | _TEXT
_VALUE = st.recursive(
    _SCALAR, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_TEXT, inner, max_size=3), max_leaves=8
)


@given(st.dictionaries(_TEXT, _VALUE, max_size=4))
def test_any_table_is_the_same_after_text(values: dict[str, Any]) -> None:
    assert tomllib.loads(to_toml(values)) == values


@given(
    st.builds(
        Outer,
        name=_TEXT,
        count=st.integers(0, 10**12),
        rate=st.floats(allow_nan=False, allow_infinity=False),
        deep=st.booleans(),
        cap=st.none() | st.floats(allow_nan=False, allow_infinity=False),
        shape=st.lists(st.integers(0, 9), max_size=3).map(tuple),
        text_or_list=_TEXT | st.lists(_TEXT, max_size=3).map(tuple),
        table=st.dictionaries(_TEXT, _VALUE, max_size=3),
        sizes=st.dictionaries(_TEXT, st.integers(0, 9), max_size=3),
        inner=st.builds(Inner, st.integers(0, 9), st.floats(0, 1)),
    )
)
def test_any_config_is_the_same_after_text(config: Outer) -> None:
    assert build(Outer, Table(tomllib.loads(to_toml(plain(config))))) == config


def test_plain_values_have_a_word_for_none_and_no_derived_keys() -> None:
    assert plain(Outer("n"))["cap"] == "none"
    assert "derived" not in plain(Outer("n"))
    assert plain({"a": (1, None)}) == {"a": [1, "none"]}


@pytest.mark.quick
def test_one_of_some_values_is_that_value_and_of_its_type() -> None:
    @dataclasses.dataclass(frozen=True)
    class Chosen:
        count: Literal[1, 2] = 1
        pack: bool | Literal["stream"] = True

    def built(**values: Any) -> Chosen:
        return build(Chosen, Table({"x": values}), "x")

    assert built(count=2, pack="stream") == Chosen(2, "stream")
    for values in ({"count": 3}, {"count": True}, {"pack": "streams"}):
        with pytest.raises(ValueError, match=f"x.{next(iter(values))} is one of"):
            built(**values)
