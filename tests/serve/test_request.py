"""What the engine answers: frozen records, though they are made by hand."""

from __future__ import annotations

import dataclasses
import inspect

import pytest

from capibara.serve import RequestOutput, Usage


@pytest.mark.quick
@pytest.mark.parametrize("record", [Usage, RequestOutput])
def test_a_record_made_by_hand_is_the_one_that_its_fields_say(record: type) -> None:
    fields = dataclasses.fields(record)
    _, *arguments = inspect.signature(record.__init__).parameters.values()
    assert [argument.name for argument in arguments] == [field.name for field in fields]
    assert [argument.annotation for argument in arguments] == [field.type for field in fields]
    defaults = [argument.default for argument in arguments if argument.default is not argument.empty]
    assert defaults == [field.default for field in fields if field.default is not dataclasses.MISSING]
    values = {field.name: number for number, field in enumerate(fields)}
    made = record(**values)
    assert dataclasses.asdict(made) == values
    assert made == record(*values.values())
    assert hash(made) == hash(record(*values.values()))
    assert dataclasses.replace(made, **{fields[0].name: 7}) != made
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(made, fields[0].name, 7)
