"""The whole suite runs on 32 virtual CPU devices; what needs more than this machine has is skipped, saying why."""

from __future__ import annotations

import os

# Read by XLA when jax first starts a backend, so it is set before anything imports jax.
# Tests compile thousands of small programs and run each once or twice: optimised machine code would cost more than it
# saves. Memory use is decided before it, and is as it would be.
os.environ["XLA_FLAGS"] = " ".join(
    [
        os.environ.get("XLA_FLAGS", ""),
        "--xla_force_host_platform_device_count=32",
        "--xla_backend_optimization_level=0",
        "--xla_llvm_disable_expensive_passes=true",
    ]
)

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="also run tests marked slow (minutes)")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    reasons = {"gpu": _no_gpu, "tpu_compiler": _no_tpu_compiler}
    found: dict[str, str | None] = {}
    for item in items:
        if item.get_closest_marker("slow") and not config.getoption("--slow"):
            item.add_marker(pytest.mark.skip(reason="takes minutes; run with --slow"))
        for marker, reason in reasons.items():
            if item.get_closest_marker(marker):
                if marker not in found:
                    found[marker] = reason()
                if found[marker]:
                    item.add_marker(pytest.mark.skip(reason=str(found[marker])))


def _no_gpu() -> str | None:
    import jax

    return None if jax.default_backend() == "gpu" else "needs an NVIDIA GPU; none is attached"


def _no_tpu_compiler() -> str | None:
    from capibara.compile import tpu_compiler

    compiler = tpu_compiler()
    return None if compiler.available else f"needs the TPU compiler: {compiler.reason}"


@pytest.fixture(autouse=True)
def _own_tuning_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test reads or writes the tuned tables of whoever runs it."""
    monkeypatch.setenv("CAPIBARA_CACHE_DIR", str(tmp_path_factory.getbasetemp() / "cache"))
