"""A profile in a file: as it was, or refused."""

from __future__ import annotations

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from capibara.observe.profiler import Profile, profile, read_profile


@pytest.fixture(scope="module")
def traced() -> Profile:
    x = jnp.ones((16, 16))
    with profile("kept", "tracing") as recording:
        jax.jit(lambda x: x @ x)(x)
    assert recording.profile is not None
    return recording.profile


@pytest.mark.quick
def test_it_comes_back_as_it_was(traced: Profile, tmp_path: Path) -> None:
    traced.save(tmp_path / "kept.json")
    assert read_profile(tmp_path / "kept.json") == traced


@pytest.mark.quick
def test_files_that_are_no_profile(traced: Profile, tmp_path: Path) -> None:
    file = tmp_path / "kept.json"
    traced.save(file)
    text = file.read_text()
    document = json.loads(text)
    for wrong, said in [
        (text[: len(text) // 2], "cut short"),
        ("{}", "another document"),
        (json.dumps({**document, "version": 99}), "version 99"),
        (json.dumps({key: value for key, value in document.items() if key != "programs"}), "missing"),
    ]:
        file.write_text(wrong)
        with pytest.raises(ValueError, match=said):
            read_profile(file)
    with pytest.raises(ValueError, match="name a file that is there"):
        read_profile(tmp_path / "nowhere.json")
