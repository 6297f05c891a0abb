"""A user's Python file as a module: what `capibara plan FILE.py:FUNCTION` and `--import FILE.py` read."""

from __future__ import annotations

import hashlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

from capibara.errors import CapibaraError, rule_error

__all__ = ["load"]


def load(file: Path, purpose: str, failed: type[CapibaraError]) -> ModuleType:
    """Run the file, with its own folder to import from, as a module whose name says the purpose and the file.

    Whatever the file raises is shown as its own, by the error that `failed` is.
    """
    if not file.is_file():
        raise rule_error("The program is in a Python file", f"{str(file)!r}, which is not there", "name a file that is")
    # A name of its own for each file: two targets called train.py are two modules.
    digest = hashlib.sha256(str(file.resolve()).encode()).hexdigest()[:12]
    name = f"capibara_{purpose}_{digest}"
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise rule_error("The program is in a Python file", repr(str(file)), "name one that ends in .py")
    module = importlib.util.module_from_spec(spec)
    folder = str(file.resolve().parent)
    sys.modules[name] = module  # dataclasses and pickle look a class's module up
    sys.path.insert(0, folder)  # it may import what lies beside it, as it can when it is run
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise failed(f"{file} cannot be loaded. {type(error).__name__}: {error}") from error
    finally:
        sys.path.remove(folder)
    return module
