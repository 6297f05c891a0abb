"""`capibara kernels list`: the ops and their implementations on the attached chip."""

from __future__ import annotations

from capibara.cli import output
from capibara.cli.kernels.options import Json, On, target_of


def list_(on: On = None, json: Json = False) -> None:
    """The ops, their implementations, how many cases each takes here, and what is tuned."""
    from capibara.kernels import op as ops
    from capibara.kernels import tables

    rows = []
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
    made = output.table(
        "op", "family", "implementation", "for", "takes", "tuned", "refuses, e.g.",
        title=f"Ops on {target.device_kind}", right=("takes", "tuned"),
    )  # fmt: skip
    last = None
    for row in rows:
        first = row["op"] != last
        last = row["op"]
        output.add_row(
            made,
            str(row["op"]) if first else "",
            str(row["family"]) if first else "",
            str(row["implementation"]),
            " ".join(row["platforms"]),  # type: ignore[arg-type]
            f"{row['accepts']} of {row['cases']}",
            str(row["tuned"] or ""),
            str(row["refuses_because"] or ""),
        )
    output.console().print(made)
