"""A compiled program as a file: made on one machine, run on another of the same kind without compiling or tracing.

The file begins with a line that says what the program is for (platform, chip, how many, versions) and a digest of what
follows. Both are checked before anything is handed to the runtime, which would end the process on a program of another
chip's instructions. What follows is jax's own serialisation, read by pickle: a file is as trusted as code is.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import logging
import os
import pickle
import platform
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from capibara.errors import rule_error, say_once

if TYPE_CHECKING:
    import jax

__all__ = [
    "executable_bytes",
    "executable_from_bytes",
    "load_executable",
    "load_or_compile",
    "processor",
    "save_executable",
    "write_whole",
]

_log = logging.getLogger(__name__)
_FORMAT = "capibara executable 1"
_PART = ".part"
_NAMES = {
    "platform": "platform",
    "chip": "chip",
    "chips": "number of chips",
    "jax": "jax",
    "jaxlib": "jaxlib",
    "compiler": "compiler",
    "processor": "processor",
}


def executable_bytes(program: Any) -> bytes:
    """What `jax.jit(...).lower(...).compile()` gave, as bytes.

    `ValueError` or `NotImplementedError` where its runtime cannot be asked for it.
    """
    from jax.experimental import serialize_executable

    body = pickle.dumps(serialize_executable.serialize(program))
    devices = _devices_of(program)
    head = {"format": _FORMAT, "digest": hashlib.sha256(body).hexdigest(), "for": _made_for(devices)}
    return json.dumps(head).encode() + b"\n" + body


def executable_from_bytes(data: bytes, devices: Sequence[jax.Device] | None = None, *, source: str = "it") -> Any:
    """The program, ready to run. A `ValueError` names what it was made for and what is here.

    Args:
      devices: to run on, in the order of the program's mesh; the first of the machine by default.
      source: what the errors call the data: a file's name.
    """
    import jax
    from jax.experimental import serialize_executable

    line, _, body = data.partition(b"\n")
    try:
        head = json.loads(line)
        made_for: Mapping[str, Any] = head["for"]
        whole = head["format"] == _FORMAT and head["digest"] == hashlib.sha256(body).hexdigest()
    except (ValueError, KeyError, TypeError):
        whole = False
    if not whole:
        raise rule_error(
            "A compiled program's file is whole", f"{source}, which is cut short or damaged", "make it anew"
        )
    here = _made_for(list(devices or jax.devices()[: int(made_for["chips"])]))
    if others := [name for name in _NAMES if made_for.get(name) != here[name]]:
        raise rule_error(
            "A compiled program runs on what it was compiled for",
            f"{source}, made for {_said(made_for, others)}; here is {_said(here, others)}",
            "compile it here: capibara.compile.load_or_compile does, and keeps the new one",
        )
    payload, in_tree, out_tree = pickle.loads(body)
    chosen = list(devices or jax.devices()[: int(made_for["chips"])])
    return serialize_executable.deserialize_and_load(payload, in_tree, out_tree, execution_devices=chosen)


def save_executable(program: Any, path: str | Path) -> Path:
    """Write a compiled program to a file, whole or not at all."""
    path = Path(path)
    write_whole(path, executable_bytes(program))
    return path


def load_executable(path: str | Path, devices: Sequence[jax.Device] | None = None) -> Any:
    """The program in a file, ready to run; a `ValueError` where it is another platform's, chip's or version's.

    >>> import jax, tempfile
    >>> program = jax.jit(lambda x: x + 1).lower(1.0).compile()
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     again = load_executable(save_executable(program, f"{folder}/add_one"))
    >>> float(again(2.0))
    3.0
    """
    return executable_from_bytes(Path(path).read_bytes(), devices, source=str(path))


def load_or_compile(
    fn: Callable[..., Any], args: Sequence[Any], path: str | Path, *, compiler_options: Mapping[str, Any] | None = None
) -> tuple[Any, bool]:
    """(the program of `fn` for such arguments, whether it was compiled now).

    It is read from the file where that has one that runs here, else it is said why not, compiled, and written there.
    The file's name is the caller's word that it is this function's: its code is not looked at.
    """
    import jax

    path = Path(path)
    if path.exists():
        try:
            return load_executable(path), False
        except (ValueError, OSError) as error:
            say_once(_log, (str(path), str(error)), "%s is compiled anew: %s", path, error)
    jitted = fn if hasattr(fn, "lower") else jax.jit(fn)
    program = jitted.lower(*args).compile(compiler_options=dict(compiler_options or {}) or None)
    try:
        save_executable(program, path)
    except (OSError, ValueError, NotImplementedError, jax.errors.JaxRuntimeError) as error:
        say_once(_log, (str(path), "save"), "The program is not kept in %s: %s", path, error)
    return program, True


def write_whole(path: Path, data: bytes) -> None:
    """Written aside and renamed, whoever else writes it or is killed."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, suffix=_PART, delete=False) as part:
        try:
            part.write(data)
            part.close()
            os.replace(part.name, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(part.name)
            raise


def _devices_of(program: Any) -> list[Any]:
    return list(program.runtime_executable().local_devices())


def _made_for(devices: Sequence[Any]) -> dict[str, Any]:
    import jax
    import jaxlib.version

    # Of this process: a program of several knows its own alone.
    devices = [device for device in devices if device.process_index == jax.process_index()] or devices
    first = devices[0]
    return {
        "platform": first.platform,
        "chip": first.device_kind,
        "chips": len(devices),
        "jax": jax.__version__,
        "jaxlib": jaxlib.version.__version__,
        "compiler": getattr(first.client, "platform_version", ""),
        "processor": hashlib.sha256("\n".join(processor()).encode()).hexdigest()[:12]
        if first.platform == "cpu"
        else "",
    }


def _said(made_for: Mapping[str, Any], names: Sequence[str]) -> str:
    return ", ".join(f"{_NAMES[name]} {made_for.get(name)}" for name in names)


@functools.lru_cache(maxsize=1)
def processor() -> tuple[str, ...]:
    """What this machine's processor can do: code for it is of its instructions, and a home may be on several machines'.

    Another processor would end the process at the first instruction that it does not know.
    """
    names = ("model name", "flags", "Features")  # the last is an ARM's
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
        found = {name.strip(): value for name, _, value in (line.partition(":") for line in lines)}
        return (platform.machine(), *(found.get(name, "") for name in names))
    return (platform.machine(), platform.processor())
