"""`--verify`: one function traced as it was, under the drop-in's table of old names, and as it was fixed.

This alone imports the code that is checked. Each side runs in a process of its own; the old one sees capibara.jax where
it imports jax, so that names which jax removed are there.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from capibara.errors import rule_error
from capibara.migrate.edits import Target
from capibara.migrate.fixes import FixFailed, fix_file
from capibara.migrate.settings import settings_for
from capibara.migrate.sources import Unreadable

__all__ = ["Verdict", "verify"]

Shapes = Sequence[tuple[str, tuple[int, ...]]]
_SECONDS = 300
_MARK = "capibara-jaxpr "


@dataclass(frozen=True)
class Verdict:
    """Whether a function traces to the same program before and after its fix."""

    verdict: Literal["equal", "different", "not comparable"]
    reason: str
    old: str = ""
    """Its jaxpr before, with its variables in order of their names."""
    new: str = ""

    def __str__(self) -> str:
        lines = [f"{self.verdict}: {self.reason}"]
        if self.verdict == "different":
            lines += ["before:", self.old, "after:", self.new]
        return "\n".join(lines)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def verify(file: Path, function: str, shapes: Shapes, target: Target = "jax", *, adapters: bool = True) -> Verdict:
    """Trace a file's function before and after the fix, and compare the jaxprs up to the names of variables.

    Args:
        file: Is imported, which runs it.
        shapes: Of its arguments: the type and the dimensions of each.
        target: As of the fix.
        adapters: As of the fix.
    """
    if not file.is_file():
        raise rule_error("--verify names a Python file", f"{str(file)!r}, which is not there", "name one that is")
    try:
        data, fixed = fix_file(file, settings_for(file.parent), target, adapters=adapters)
    except (Unreadable, FixFailed) as error:
        return Verdict("not comparable", str(error))
    if not fixed.changed:
        same = _traced(file, file, function, shapes, served=False)
        if "error" in same:
            return Verdict("not comparable", f"there is nothing to fix, and it cannot be traced: {same['error']}")
        return Verdict("equal", "there is nothing to fix", same["jaxpr"], same["jaxpr"])
    old = _traced(file, file, function, shapes, served=True)
    if "error" in old:
        return Verdict("not comparable", f"the old function cannot be traced: {old['error']}")
    with tempfile.TemporaryDirectory(prefix="capibara-verify-") as folder:
        copy = Path(folder) / file.name
        copy.write_bytes(data)
        new = _traced(copy, file, function, shapes, served=False)
    if "error" in new:
        return Verdict("different", f"the fixed function cannot be traced: {new['error']}", old["jaxpr"])
    if old["jaxpr"] == new["jaxpr"] and old["consts"] == new["consts"]:
        return Verdict("equal", "the jaxprs are the same but for the names of variables", old["jaxpr"], new["jaxpr"])
    what = "jaxprs" if old["jaxpr"] != new["jaxpr"] else "constants of the jaxprs"
    return Verdict("different", f"the {what} differ", old["jaxpr"], new["jaxpr"])


def _traced(file: Path, beside: Path, function: str, shapes: Shapes, *, served: bool) -> dict[str, Any]:
    """What a process of its own traces; {"error": why} where it cannot."""
    request = {"file": str(file.resolve()), "folder": str(beside.resolve().parent), "function": function,
               "shapes": [[dtype, list(dims)] for dtype, dims in shapes], "served": served}  # fmt: skip
    paths = os.pathsep.join(path for path in sys.path if path)
    try:
        process = subprocess.run(
            [sys.executable, "-c", "from capibara.migrate.verify import trace_here; trace_here()"],
            input=json.dumps(request),
            capture_output=True,
            text=True,
            timeout=_SECONDS,
            env={**os.environ, "PYTHONPATH": paths},
        )
    except subprocess.TimeoutExpired:
        return {"error": f"it did not end in {_SECONDS} s"}
    answers = [line for line in process.stdout.splitlines() if line.startswith(_MARK)]
    if not answers:
        last = process.stderr.strip().splitlines()[-1:] or [f"exit code {process.returncode}"]
        return {"error": last[0]}
    answer: dict[str, Any] = json.loads(answers[-1].removeprefix(_MARK))
    return answer


def trace_here() -> None:
    """The process's side: imports the file and prints its function's jaxpr as a line of JSON."""
    request = json.loads(sys.stdin.read())
    try:
        answer = _trace(request)
    except Exception as error:  # noqa: BLE001 whatever the user's code raises is the answer
        answer = {"error": f"{type(error).__name__}: {error}".splitlines()[0]}
    sys.stdout.write(f"\n{_MARK}{json.dumps(answer)}\n")


def _trace(request: dict[str, Any]) -> dict[str, Any]:
    import importlib.util

    import jax
    import numpy as np

    sys.path.insert(0, request["folder"])
    if request["served"]:
        _serve_old_names()
    spec = importlib.util.spec_from_file_location("verified", request["file"])
    if spec is None or spec.loader is None:
        raise ImportError("it is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules["verified"] = module
    spec.loader.exec_module(module)
    if not hasattr(module, request["function"]):
        raise AttributeError(f"it has no {request['function']}")
    arguments = [jax.ShapeDtypeStruct(tuple(dims), np.dtype(dtype)) for dtype, dims in request["shapes"]]
    closed = jax.make_jaxpr(getattr(module, request["function"]))(*arguments)
    consts = [[str(getattr(one, "dtype", type(one))), np.asarray(one).tolist()] for one in closed.consts]
    return {"jaxpr": _without_names(str(closed.jaxpr)), "consts": repr(consts)}


def _without_names(jaxpr: str) -> str:
    """A jaxpr whose addresses are gone; variables are named in order of their binding by jax itself."""
    return re.sub(r"0x[0-9a-f]+", "0x", jaxpr)


def _serve_old_names() -> None:
    """`import jax…` gives capibara.jax… from here on, to modules that are imported later."""
    import builtins
    import importlib

    dropin = importlib.import_module("capibara.jax")  # by name: doors are above this room
    real = builtins.__import__

    def serving(name: str, globals: Any = None, locals: Any = None, fromlist: Any = (), level: int = 0) -> Any:
        importer = (globals or {}).get("__name__", "")
        if level or name.partition(".")[0] != "jax" or importer.partition(".")[0] in _OWN:
            return real(name, globals, locals, fromlist, level)
        module = importlib.import_module(f"capibara.{name}")
        if not fromlist:
            return dropin
        for one in fromlist:
            if one != "*" and not hasattr(module, one):
                importlib.import_module(f"capibara.{name}.{one}")
        return module

    builtins.__import__ = serving


_OWN = frozenset({"jax", "jaxlib", "capibara", "numpy", "scipy", "ml_dtypes", "opt_einsum"})
"""Packages that go on to see jax itself: those that it is made of."""
