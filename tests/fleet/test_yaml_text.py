"""Our YAML, read back by PyYAML."""

from __future__ import annotations

from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from capibara.fleet.yaml_text import yaml_text

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=20) | st.sampled_from(
    ["no", "1_000", "0x1", "a: b", "- x", "#", "a #", "~", "a\nb\n", " a\n", "a\n\n", "a\r\nb\n", "\n", "12:30:45", "=",
     "\x85"]
)  # fmt: skip
DATA = st.recursive(
    st.none() | st.booleans() | st.integers() | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=12,
)


@pytest.mark.quick
@given(DATA)
def test_what_is_written_is_read(data: Any) -> None:
    assert yaml.safe_load(yaml_text(data)) == data


def test_other_data_is_refused() -> None:
    with pytest.raises(TypeError, match="float"):
        yaml_text({"a": [1.5]})
