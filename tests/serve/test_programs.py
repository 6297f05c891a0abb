"""What the host says of a step is one array, taken apart on the device."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from capibara.serve.programs import Shape, fields_of


@pytest.mark.quick
@pytest.mark.parametrize("shape", [Shape(3, 3, 5, 3), Shape(40, 3, 5, 6)], ids=["decode", "ragged"])
def test_every_part_comes_apart_as_it_was_put_in_and_is_aligned(shape: Shape) -> None:
    fields = fields_of(shape)
    whole, parts = fields.new()
    draw = np.random.default_rng(0)
    for name, part in parts.items():
        # A GPU's kernel is handed the part where it lies in the whole, and takes what is aligned to 256 bytes.
        assert (part.__array_interface__["data"][0] - whole.__array_interface__["data"][0]) % 256 == 0, name
        part[...] = draw.integers(-5, 5, part.shape) if part.dtype == np.int32 else draw.normal(size=part.shape)
    apart = jax.jit(fields.unpack)(whole)
    assert set(apart) == set(parts)
    for name, part in parts.items():
        assert apart[name].dtype == part.dtype
        np.testing.assert_array_equal(apart[name], part)
