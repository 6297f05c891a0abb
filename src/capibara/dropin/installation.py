"""Whether capibara.jax works on this machine, and what it lacks. Imports without jax, to say that it does not."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import platform
import shutil
from dataclasses import dataclass
from pathlib import Path

from capibara._version import __version__
from capibara.distribution import install_command
from capibara.dropin import broken as _broken
from capibara.hardware import devices
from capibara.hardware.devices import AttachedDevice

__all__ = ["Installation", "Missing", "check_installation", "versions"]

_NVIDIA = Path("/proc/driver/nvidia/version")


@dataclass(frozen=True)
class Missing:
    """Something that would help and is not installed."""

    what: str
    why: str
    command: str

    def __str__(self) -> str:
        return f"{self.what}: {self.why}. Install it with: {self.command}"


@dataclass(frozen=True)
class Installation:
    """The result of `check_installation`; printed, it is a few lines to read."""

    jax_native_available: bool
    """jax initialised a backend and multiplied two matrices right."""
    error_message: str | None
    versions: dict[str, str]
    devices: tuple[AttachedDevice, ...]
    missing: tuple[Missing, ...]

    def __str__(self) -> str:
        state = "works" if self.jax_native_available else f"does not work: {self.error_message}"
        named = ", ".join(f"{name} {version}" for name, version in self.versions.items())
        kinds = ", ".join(sorted({one.device_kind for one in self.devices})) or "none"
        lines = [f"capibara.jax {state}", f"versions: {named}", f"devices: {len(self.devices)} ({kinds})"]
        return "\n".join([*lines, *(f"missing: {one}" for one in self.missing)])


def check_installation() -> Installation:
    """Try jax on this machine, and look for what is missing."""
    found: tuple[AttachedDevice, ...] = ()
    broken = _broken.reason()
    if broken is not None:
        problem: str | None = f"jax cannot be imported: {_broken.described(broken)}"
    else:
        try:
            found = tuple(devices.attached())
            problem = _wrong_product()
        except RuntimeError as error:  # what jax raises when a backend cannot start or dies
            problem = str(error)
    return Installation(
        jax_native_available=problem is None,
        error_message=problem,
        versions=versions(),
        devices=found,
        missing=(*_missing_of_jax(broken), *_missing({one.platform for one in found})),
    )


def versions() -> dict[str, str]:
    """Of capibara and what it stands on; packages that are not installed are left out."""
    found = {"capibara": __version__, "python": platform.python_version()}
    for package in ("jax", "jaxlib", "numpy", "libtpu"):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _missing_of_jax(broken: Exception | None) -> list[Missing]:
    if broken is None:
        return []
    absent = broken.name if isinstance(broken, ModuleNotFoundError) else None
    if absent in ("jax", "jaxlib"):
        return [Missing(absent, "it is not installed, and nothing runs without it", _broken.REINSTALL)]
    return [Missing("a jax and a jaxlib that load", "those installed do not", _broken.REINSTALL)]


def _wrong_product() -> str | None:
    import jax
    import jax.numpy as jnp

    # Small whole numbers are exact at every matmul precision.
    a = jnp.arange(64.0, dtype=jnp.float32).reshape(8, 8)
    swap = jnp.eye(8)[::-1]
    if bool(jnp.array_equal(jax.jit(jnp.matmul)(swap, a), a[::-1])):
        return None
    return "a product of two small matrices came out wrong on the default device"


def _missing(platforms: set[str]) -> list[Missing]:
    lacking = []
    if "gpu" not in platforms and _has_nvidia_gpu():
        lacking.append(
            Missing(
                "jax's CUDA plugin",
                "this machine has an NVIDIA GPU that jax does not see",
                install_command("cuda"),
            )
        )
    if _libtpu_installs_here() and importlib.util.find_spec("libtpu") is None:
        lacking.append(
            Missing(
                "libtpu",
                "it runs on a TPU, and without one compiles for TPUs by name",
                install_command("tpu"),
            )
        )
    return lacking


def _has_nvidia_gpu() -> bool:
    return _NVIDIA.exists() or shutil.which("nvidia-smi") is not None


def _libtpu_installs_here() -> bool:
    return platform.system() == "Linux" and platform.machine() == "x86_64"
