"""Which way a decomposition is computed, and why: decided from shapes alone, before anything runs."""

from __future__ import annotations

import dataclasses

import numpy as np

from capibara.errors import rule_error, unknown_name
from capibara.kernels.core.context import Target
from capibara.kernels.ops.linalg.svd.rows import AxisName

METHODS = ("auto", "randomized", "exact")
CORES = ("auto", "xla", "jacobi")
DEFAULTS = {"oversampling": 10, "power_iterations": 2, "core": "auto"}
"""What of a sketch may be chosen."""
MUCH_SMALLER = 2
"""By itself a sketch is chosen up to one part in so many of the smaller side; beyond it, exact costs little more."""
TALL = 2
"""A matrix with so many times more rows than columns is first reduced to a square one."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """How one matrix is decomposed: what is not an array."""

    rows: int
    """Of the whole matrix, wherever they lie."""
    columns: int
    rank: int
    method: str
    why: str
    sketch: int
    """The columns of the random sketch; 0 without one."""
    power_iterations: int
    core: str
    """What decomposes the small square matrix of the randomized method: "xla" or "jacobi"."""
    compute_uv: bool = True
    axis_name: AxisName = None

    @property
    def reduced(self) -> str | None:
        """Which side of the exact method's matrix is first reduced to the other one's length; None for neither."""
        if self.axis_name is not None or self.rows >= TALL * self.columns:
            return "rows"
        return "columns" if self.columns >= TALL * self.rows else None

    @property
    def flops(self) -> float:
        """Of the products with the matrix and its sketches; a library SVD of a square matrix counts 20 n³."""
        m, n, small = self.rows, self.columns, min(self.rows, self.columns)
        if self.method == "exact":
            return 20.0 * small**3 + (6.0 * max(m, n) * small**2 if self.reduced else 8.0 * max(m, n) * small**2)
        width, passes = self.sketch, 2 * self.power_iterations + 2
        return 2.0 * m * n * width * passes + 6.0 * (m + n) * width**2 * (self.power_iterations + 1) + 20.0 * width**3

    def __str__(self) -> str:
        lines = [f"svd of {self.rows} x {self.columns}, rank {self.rank}: {self.method}", f"  because {self.why}"]
        if self.method == "randomized":
            lines.append(
                f"  a sketch of {self.sketch} columns, {self.power_iterations} power iterations, "
                f"Cholesky QR repeated until it is safe, a {self.sketch} x {self.sketch} core by {self.core}"
            )
        elif self.reduced:
            small = min(self.rows, self.columns)
            lines.append(f"  the {self.reduced} first reduced by Cholesky QR, then a {small} x {small} one by XLA")
        else:
            lines.append("  the whole matrix by XLA")
        return "\n".join([*lines, f"  {self.flops:.3g} flops"])


def choose(
    rows: int,
    columns: int,
    *,
    rank: int | None,
    compute_uv: bool,
    method: str,
    oversampling: int,
    power_iterations: int,
    core: str,
    axis_name: AxisName,
    target: Target,
) -> Plan:
    small = min(rows, columns)
    shape = f"a matrix of {rows} x {columns}"
    if method not in METHODS:
        raise unknown_name("method of fast_svd", method, METHODS)
    if core not in CORES:
        raise unknown_name("core of fast_svd", core, CORES)
    for name, number in (("rank", rank), ("oversampling", oversampling), ("power_iterations", power_iterations)):
        whole = isinstance(number, int | np.integer) and not isinstance(number, bool)
        if not whole and not (name == "rank" and number is None):
            raise rule_error(f"{name} is a whole number", repr(number), "pass an int")
    if oversampling < 0:
        raise rule_error("oversampling is the sketch's columns beyond rank: 0 or more", oversampling, "pass e.g. 10")
    if power_iterations < 0:
        raise rule_error("power_iterations is a count: 0 or more", power_iterations, "pass e.g. 2")
    if rank is not None and small == 0:
        raise rule_error("An empty matrix has no singular triplets", f"rank={rank} for {shape}", "leave rank out")
    if rank is not None and not 1 <= rank <= small:
        raise rule_error(
            "rank is from 1 to the smaller side of the matrix", f"rank={rank} for {shape}", f"pass 1 to {small}"
        )
    if rank is None and method == "randomized":
        raise rule_error("The randomized method finds the leading `rank` triplets", "rank=None", "pass rank")
    sketching = {"oversampling": oversampling, "power_iterations": power_iterations, "core": core}
    chosen = {name: value for name, value in sketching.items() if value != DEFAULTS[name]}
    if method == "exact" and chosen:
        raise rule_error(
            f"{' and '.join(chosen)} are for a sketch, and the exact method takes none",
            ", ".join(f"{name}={value!r}" for name, value in chosen.items()),
            "leave them out, or use method='randomized' or 'auto'",
        )
    width = 0 if rank is None else min(rank + oversampling, small)
    if method != "auto":
        why = "it was asked for"
    elif rank is None:
        method, why = "exact", "no rank was given: all singular values are wanted"
    elif MUCH_SMALLER * (rank + oversampling) <= small:
        method = "randomized"
        why = f"rank {rank} and {oversampling} more are at most 1/{MUCH_SMALLER} of the smaller side, {small}"
    else:
        method = "exact"
        why = f"rank {rank} and {oversampling} more are over 1/{MUCH_SMALLER} of the smaller side, {small}"
    if method == "exact":
        if axis_name is not None and rows < columns:
            raise rule_error(
                "The exact method with rows over axis_name is for matrices with as many rows as columns, or more",
                shape,
                "decompose the transpose with its rows spread, or use method='randomized'",
            )
        return Plan(rows, columns, rank or small, method, why, 0, 0, "xla", compute_uv, axis_name)
    if core == "auto":
        # A library SVD takes minutes to compile for a TPU, even of a small matrix.
        core = "jacobi" if target.platform == "tpu" else "xla"
    assert rank is not None
    return Plan(rows, columns, rank, method, why, width, power_iterations, core, compute_uv, axis_name)
