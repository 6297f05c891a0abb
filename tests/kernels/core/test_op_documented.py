"""What `help()` says of the classes that an op is made of: every field, one by one."""

from __future__ import annotations

import dataclasses
import inspect
import re

import pytest

from capibara.kernels import Call, Case, Cost, Gradient, Implementation, Op, Partition
from capibara.kernels.core.spec import Excerpt

CLASSES = (Op, Implementation, Cost, Case, Gradient, Partition, Call, Excerpt)


def _parameters(of: type) -> list[str]:
    if dataclasses.is_dataclass(of):
        return [field.name for field in dataclasses.fields(of)]
    return [name for name in inspect.signature(of).parameters if name != "self"]


@pytest.mark.parametrize("of", CLASSES)
def test_each_parameter_has_its_line(of: type) -> None:
    text = inspect.getdoc(of) or ""
    _, heading, listed = re.split(r"^(Args|Attributes):$", text, maxsplit=1, flags=re.MULTILINE)
    assert heading == ("Attributes" if dataclasses.is_dataclass(of) else "Args")
    # An entry is "name: at least two words"; its further lines are indented once more.
    entries = re.findall(r"^  (\w+): (?:\S+ )+\S+", listed, flags=re.MULTILINE)
    assert entries == _parameters(of), "every parameter, in the order of the signature, and no other"


def test_help_shows_them() -> None:
    import pydoc

    shown = pydoc.plain(pydoc.render_doc(Op))
    for name in _parameters(Op):
        assert f"{name}: " in shown
