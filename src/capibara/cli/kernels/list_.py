"""`capibara kernels list`: the ops and their implementations on the attached chip."""

from __future__ import annotations

from typing import Any

from capibara.cli import output
from capibara.cli.kernels.options import Imports, Json, On, target_of


def list_(on: On = None, modules: Imports = None, json: Json = False) -> None:
    """The ops, their implementations, how many cases each takes here, and what is tuned."""
    from capibara.kernels.core import op as ops
    from capibara.kernels.core import tables

    rows: list[dict[str, Any]] = []
    with target_of(on) as target:
        for op in ops.registry().values():
            calls = [op.call(*case.args(), target=target, **dict(case.params)) for case in op.cases]
            tuned = tables.entries(target.device_kind, op.name)
            for impl in op.implementations.values():
                reasons = [impl.refusal(call) for call in calls]
                rows.append(
                    {
                        "op": op.name,
                        "family": op.family,
                        "implementation": impl.name,
                        "kernel": impl.kernel,
                        "platforms": list(impl.platforms),
                        "cases": len(calls),
                        "accepts": sum(reason is None for reason in reasons),
                        "tuned": sum(entry.implementation == impl.name for entry in tuned),
                        "refuses_because": next((reason for reason in reasons if reason is not None), None),
                    }
                )
    if json:
        output.show_json({"device_kind": target.device_kind, "platform": target.platform, "implementations": rows})
        return
    _show(rows, target.device_kind)


def _show(rows: list[dict[str, Any]], device_kind: str) -> None:
    """A line an implementation within 80 columns; many refuse for one reason, which is written once, below."""
    from capibara.kernels.core.context import PLATFORMS

    made = output.table(
        "op", "implementation", "for", "takes", "tuned", "why not",
        title=f"Ops on {device_kind}", right=("takes", "tuned"),
    )  # fmt: skip
    reasons: dict[str, int] = {}
    family = op = None
    for row in rows:
        if row["family"] != family:
            if family is not None:
                made.add_section()
            family = row["family"]
            output.add_row(made, f"{family}:")
        reason = row["refuses_because"]
        output.add_row(
            made,
            f"  {row['op']}" if row["op"] != op else "",
            row["implementation"],
            "all" if set(row["platforms"]) == set(PLATFORMS) else " ".join(row["platforms"]),
            f"{row['accepts']} of {row['cases']}",
            str(row["tuned"] or ""),
            "" if reason is None else f"({reasons.setdefault(reason, len(reasons) + 1)})",
        )
        op = row["op"]
    screen = output.console()
    screen.print(made)
    screen.print("takes: how many of its cases. why not: why it refuses, the first of the others.", markup=False)
    for reason, number in reasons.items():
        screen.print(f"({number}) {reason}", markup=False)
