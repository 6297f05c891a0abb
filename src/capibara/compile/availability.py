"""Is the TPU compiler on this machine, and if not, why and what to type."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import importlib.util
import platform

from capibara.distribution import install_command

__all__ = ["INSTALL_COMMAND", "TpuCompiler", "tpu_compiler"]

INSTALL_COMMAND = install_command("tpu")

_PACKAGES = ("libtpu", "libtpu-nightly")


@dataclasses.dataclass(frozen=True)
class TpuCompiler:
    """Whether libtpu can be loaded here. `reason` is a sentence in either case."""

    available: bool
    reason: str
    version: str | None
    install: str = INSTALL_COMMAND

    def __str__(self) -> str:
        return self.reason if self.available else f"{self.reason} {self.install}"


def tpu_compiler() -> TpuCompiler:
    """Looks for libtpu without loading it: loading would fix its flags for the life of the process."""
    system, machine = platform.system(), platform.machine()
    if system != "Linux" or machine not in ("x86_64", "AMD64"):
        return TpuCompiler(
            False,
            f"libtpu ships for x86-64 Linux only and this is {machine} {system}: TPU code is lowered here, "
            "not compiled. On an x86-64 Linux machine:",
            None,
        )
    if importlib.util.find_spec("libtpu") is None:
        return TpuCompiler(
            False,
            "libtpu is not installed: TPU code is lowered here, not compiled. No TPU is needed to compile; "
            "install it with:",
            None,
        )
    version = _version()
    return TpuCompiler(True, f"libtpu {version or 'of unknown version'} is installed.", version)


def _version() -> str | None:
    for package in _PACKAGES:
        try:
            return importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None
