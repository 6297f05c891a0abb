"""What was compiled is counted by jax's own events, and a moment is counted once."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from capibara.compile.events import CompileCounts, count_compilations


@pytest.mark.quick
def test_a_program_counts_once_and_not_when_it_runs_again() -> None:
    function = jax.jit(lambda x: jnp.sin(x) * 7)
    x = jnp.ones(9)
    with count_compilations() as counts:
        function(x)
        function(x)
    assert (counts.programs, counts.compiled, counts.names) == (1, 1, ["jit(<lambda>)"])
    assert counts.compile_seconds > 0
    assert counts.trace_seconds > 0
    with count_compilations() as later:
        function(x)
    assert later.programs == 0
    assert counts.programs == 1  # its context is closed


def test_spans_inside_of_others_are_no_more_time() -> None:
    counts = CompileCounts()
    event = "/jax/core/compile/jaxpr_trace_duration"
    for start, end in ((1.0, 2.0), (0.0, 3.0), (5.0, 6.0)):
        counts._span(event, start, end)
    assert counts.trace_seconds == 4.0
