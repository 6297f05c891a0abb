"""Where a plan is for: slices, GPUs of a host, and a mesh that is given."""

from __future__ import annotations

import pytest

from capibara.plan.place import hosts_of, mesh_axes, place


@pytest.mark.quick
def test_slices_and_gpus_by_name() -> None:
    assert (place("v4-32").chips, hosts_of(place("v4-32"))) == (16, 4)
    assert place("v4:2x2x4") == place("v4-32")
    assert place("h200").chips == 1
    eight = place("h200x8")
    assert (eight.chips, eight.chip.name, hosts_of(eight)) == (8, "h200", 1)
    assert place("h100").chip.name == "h100_sxm"


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("v4-33", "use v4-32"),
        ("v44-32", "Did you mean 'v4-32'"),
        ("h20", "Did you mean 'h200'"),
        ("h200x3", "1, 2, 4 or 8 GPUs"),
        ("h200x16", "1, 2, 4 or 8 GPUs"),
        ("cpu", "TPU slice or GPUs"),
        ("v4", "add a size"),
    ],
)
def test_a_name_that_is_none_is_answered_with_the_nearest(name: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        place(name)


def test_a_mesh_multiplies_to_the_chips() -> None:
    assert mesh_axes("data=4, model=8", place("v4-64")) == {"data": 4, "model": 8}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("data=3,model=8", "use data=4,model=8"),
        ("data=4,model=4", "32 chips.*data=4,model=4 = 16.*use data=8,model=4"),
        ("data=4,modl=8", "Did you mean 'model'"),
        ("data=4,data=8", "axis=size"),
        ("4x8", "axis=size"),
        ("data=0,model=8", "axis=size"),
    ],
)
def test_a_bad_mesh_is_answered_with_the_nearest(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        mesh_axes(text, place("v4-64"))


def test_the_choices_are_a_line_or_two_and_not_a_page() -> None:
    with pytest.raises(ValueError, match="'v4-8192'") as error:
        place("v9-8")
    assert "'v4-384'" not in str(error.value)
