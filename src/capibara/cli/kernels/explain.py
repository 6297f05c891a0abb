"""`capibara kernels explain`: which implementation a call takes, and why each other one does not."""

from __future__ import annotations

from typing import Annotated

import typer

from capibara.cli import operands, output
from capibara.cli.kernels.options import Imports, Json, On, target_of


def explain(
    op: Annotated[str, typer.Argument(metavar="OP", help="The op's name, or that of a function it runs.")],
    shapes: Annotated[
        list[str],
        typer.Argument(metavar="SHAPES...", help="Operands: bf16[4096,4096], or - for an absent one."),
    ],
    param: Annotated[
        list[str] | None, typer.Option("--param", metavar="KEY=VALUE", help="A parameter of the op.")
    ] = None,
    on: On = None,
    modules: Imports = None,
    json: Json = False,
) -> None:
    """Which implementation a call takes and why; nothing is computed.

    For example: capibara kernels explain gemm bf16[4096,4096] bf16[4096,4096] --param activation=gelu --on v4
    """
    from capibara.kernels.core import dispatch
    from capibara.kernels.core import op as ops
    from capibara.kernels.lab import bench
    from capibara.kernels.lab.timing import format_seconds

    found = ops.lookup(op)
    arrays = [operands.operand(text) for text in shapes]
    _, of_function = found.functions.get(op, (None, {}))
    given = {**of_function, **operands.parameters(param or [])}
    with target_of(on) as target:
        call = found.call(*arrays, target=target, **given)
        selection = dispatch.select(call)
        cost = found.cost(call)
        limit = bench.limit_seconds(call, cost)
    if json:
        work = {"flops": cost.flops, "bytes": cost.bytes, "link_bytes": cost.link_bytes, "limit_seconds": limit}
        output.show_json({**selection.as_dict(), **work})
        return
    screen = output.console()
    screen.print(str(selection), markup=False)
    least = "" if limit is None else f": at least {format_seconds(limit)} on {target.device_kind}"
    sent = f", {output.size(cost.link_bytes)} sent to other devices" if cost.link_bytes else ""
    screen.print(f"  {cost.flops:.3g} flop, {output.size(cost.bytes)} moved{least}{sent}", markup=False)
