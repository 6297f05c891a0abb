"""Run a program, and write down every line of it that takes a name which the installed jax lacks.

    python tools/jax_probe.py FOLDER -m pytest -n0 FOLDER/tests     # or: FOLDER script.py argument …

Modules below FOLDER see jax through a glass: a name that is not there is written down with the line that asked, and
capibara.jax serves it where it can, so that the program goes on to its next break. At the end the lines are printed,
`file:line name`. The lists of breaks in tools/migration_corpus.py were made with it; the checker has no part in it.
"""

from __future__ import annotations

import builtins
import importlib
import os
import runpy
import sys
import types
from pathlib import Path
from typing import Any

import jax


class Probe:
    """What was asked for and was not there: "file:line" -> names."""

    def __init__(self, folder: Path) -> None:
        self.folder = f"{folder.resolve()}{os.sep}"
        self.missing: dict[str, set[str]] = {}
        self._seen: dict[str, types.ModuleType] = {}
        self._import = builtins.__import__

    def note(self, frame: types.FrameType | None, path: str) -> None:
        """At the innermost line of the program, below which jax or Python may be."""
        while frame is not None and not frame.f_code.co_filename.startswith(self.folder):
            frame = frame.f_back
        if frame is not None:
            place = f"{frame.f_code.co_filename.removeprefix(self.folder)}:{frame.f_lineno}"
            self.missing.setdefault(place, set()).add(path)

    def see(self, module: types.ModuleType) -> types.ModuleType:
        """A module of jax as the program is shown it."""
        if module.__name__ not in self._seen:
            self._seen[module.__name__] = _Glass(self, module)
        return self._seen[module.__name__]

    def imported(self, name: str, globals: Any = None, locals: Any = None, fromlist: Any = (), level: int = 0) -> Any:
        """In place of `__import__`."""
        importer = (globals or {}).get("__file__") or ""
        if level or name.partition(".")[0] != "jax" or not importer.startswith(self.folder):
            return self._import(name, globals, locals, fromlist, level)
        try:
            module = importlib.import_module(name)
        except ImportError:
            self.note(sys._getframe(1), name)
            module = importlib.import_module(f"capibara.{name}")
        for one in fromlist or ():
            if one != "*" and not hasattr(module, one):
                try:
                    importlib.import_module(f"{name}.{one}")
                except ImportError:
                    continue  # a name, which the glass is asked for next
        return self.see(module) if fromlist else self.see(jax)


class _Glass(types.ModuleType):
    """A module of jax that notes what it is asked for and has not."""

    def __init__(self, probe: Probe, module: types.ModuleType) -> None:
        super().__init__(module.__name__)
        self.__dict__.update(_probe=probe, _module=module)

    def __getattribute__(self, name: str) -> Any:
        own = types.ModuleType.__getattribute__(self, "__dict__")
        if "_module" not in own:
            return types.ModuleType.__getattribute__(self, name)
        probe, module = own["_probe"], own["_module"]
        try:
            value = getattr(module, name)
        except AttributeError:
            if name.startswith("__"):
                raise
            plain = module.__name__.removeprefix("capibara.")
            probe.note(sys._getframe(1), f"{plain}.{name}")
            value = getattr(importlib.import_module(f"capibara.{plain}"), name)
        is_jax = isinstance(value, types.ModuleType) and value.__name__.partition(".")[0] == "jax"
        return probe.see(value) if is_jax else value


def main() -> int:
    if len(sys.argv) < 3:
        print((__doc__ or "").partition("\n\n")[2])
        return 2
    probe = Probe(Path(sys.argv[1]))
    importlib.import_module("capibara.jax")  # before jax is seen through the glass
    builtins.__import__ = probe.imported
    sys.path.insert(0, probe.folder)
    code: Any = 0
    try:
        if sys.argv[2] == "-m":
            sys.argv = sys.argv[3:]
            runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        else:
            sys.argv = sys.argv[2:]
            runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as ended:
        code = ended.code
    finally:
        builtins.__import__ = probe._import
        for place, paths in sorted(probe.missing.items()):
            print(place, *sorted(paths))
    return code if isinstance(code, int) else 0


if __name__ == "__main__":
    sys.exit(main())
