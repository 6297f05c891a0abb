"""Is the TPU's, or a GPU's, compiler on this machine, and if not, why and what to type."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import importlib.util
import platform
from collections.abc import Sequence

from capibara.distribution import install_command

__all__ = ["INSTALL_COMMAND", "ChipCompiler", "chip_compiler", "gpu_compiler", "tpu_compiler"]

INSTALL_COMMAND = install_command("tpu")

_PACKAGES = ("libtpu", "libtpu-nightly")
_GPU_NAME = "XLA's compiler for GPUs"
_GPU_PLUGINS = {"jax_plugins.xla_cuda13": "jax-cuda13-plugin", "jax_plugins.xla_cuda12": "jax-cuda12-plugin"}


@dataclasses.dataclass(frozen=True)
class ChipCompiler:
    """Whether a chip's own compiler can be loaded here. `reason` is a sentence in either case."""

    available: bool
    reason: str
    version: str | None
    install: str = INSTALL_COMMAND
    name: str = "the TPU compiler libtpu"

    def __str__(self) -> str:
        return self.reason if self.available else f"{self.reason} {self.install}"

    @property
    def named(self) -> str:
        """With its version."""
        return f"{self.name} {self.version}" if self.version else self.name


def chip_compiler(platform: str) -> ChipCompiler:
    """The compiler of chips of a platform, "tpu" or "gpu", whether it is here or not."""
    return gpu_compiler() if platform == "gpu" else tpu_compiler()


def tpu_compiler() -> ChipCompiler:
    """Looks for libtpu without loading it: loading would fix its flags for the life of the process."""
    system, machine = platform.system(), platform.machine()
    if system != "Linux" or machine not in ("x86_64", "AMD64"):
        return ChipCompiler(
            False,
            f"libtpu ships for x86-64 Linux only and this is {machine} {system}: TPU code is lowered here, "
            "not compiled. On an x86-64 Linux machine:",
            None,
        )
    if importlib.util.find_spec("libtpu") is None:
        return ChipCompiler(
            False,
            "libtpu is not installed: TPU code is lowered here, not compiled. No TPU is needed to compile; "
            "install it with:",
            None,
        )
    version = _version(_PACKAGES)
    return ChipCompiler(True, f"libtpu {version or 'of unknown version'} is installed.", version)


def gpu_compiler() -> ChipCompiler:
    """Looks for jax's plugin for CUDA without loading it. Neither a GPU nor its driver is needed to compile."""
    install = install_command("cuda")
    found = [name for name in _GPU_PLUGINS if _is_there(name)]
    if not found:
        reason = (
            "jax's plugin for CUDA is not installed: GPU code is lowered here, not compiled. No GPU is needed to "
            "compile; install it with:"
        )
        return ChipCompiler(False, reason, None, install, _GPU_NAME)
    package = _GPU_PLUGINS[found[0]]
    version, jaxlib = _version((package,)), _version(("jaxlib",))
    if version != jaxlib:
        reason = f"{package} {version} does not belong to jaxlib {jaxlib}: install both of one version with:"
        return ChipCompiler(False, reason, version, install, _GPU_NAME)
    return ChipCompiler(True, f"{package} {version} is installed.", version, install, _GPU_NAME)


def _is_there(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # no jax_plugins at all
        return False


def _version(packages: Sequence[str]) -> str | None:
    for package in packages:
        try:
            return importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None
