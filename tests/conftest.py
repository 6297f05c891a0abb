"""The whole suite runs on 32 virtual CPU devices; what needs more than this machine has is skipped, saying why."""

from __future__ import annotations

import gc
import os
import shutil
import sys
from collections.abc import Iterable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

# Read by XLA when jax first starts a backend, so it is set before anything imports jax.
# Tests compile thousands of small programs and run each once or twice: optimised machine code would cost more than it
# saves. Memory use is decided before it, and is as it would be.
os.environ["XLA_FLAGS"] = " ".join(
    [
        os.environ.get("XLA_FLAGS", ""),
        "--xla_force_host_platform_device_count=32",
        "--xla_backend_optimization_level=0",
        "--xla_llvm_disable_expensive_passes=true",
        # A program is split into 32 modules to be compiled at once: for small ones on few cores that is more work in
        # all, a third of the time to compile.
        "--xla_cpu_parallel_codegen_split_count=1",
        # Fused loops straight to LLVM instead of through MLIR: a third of the time to compile. Later versions do not
        # know this flag, and stop at what they do not know; they compile as they always do.
        *(["--xla_cpu_use_fusion_emitters=false"] if metadata.version("jaxlib").startswith("0.10.") else []),
    ]
)

# A command that a test runs in this process would turn the cache of programs on for every test after it; the tests of
# that cache turn it on for themselves.
os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "false"

import hypothesis
import pytest

# The same examples in every run: what is green stays green until the code changes. To draw others:
# --hypothesis-profile=default.
hypothesis.settings.register_profile("repeatable", derandomize=True, database=None, deadline=None)
hypothesis.settings.load_profile("repeatable")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="also run tests marked slow (minutes)")


def pytest_configure(config: pytest.Config) -> None:
    """Every shape in a signature is checked, but for the quick run, which people wait for."""
    if config.option.markexpr != "quick":
        from tests import shapes

        shapes.install()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    not_quick = _thinned_out_of_quick(items)
    _thin_out_spread(items, not_quick)
    if config.option.markexpr == "quick":
        items[:] = [item for item in items if item not in not_quick]
    _long_files_first(items)
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


def pytest_collection_finish(session: pytest.Session) -> None:
    """What is there when the first test starts stays to the end: the collector need not walk through it again.

    Tracing makes many objects and few cycles of them, so it also looks less often.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 10, 10)


def _thinned_out_of_quick(items: list[pytest.Item]) -> set[pytest.Item]:
    """The other cases, where `quick` on a test with many, or on its file, is one, the last; `quick(cases=n)` is n,
    spread over them, or "all".

    The quick run is what people wait for, and what the newest JAX gets, where what differs is how a program is traced
    and lowered; every case runs on the oldest. Of what only the newest can run (JAX's emulation of Hopper kernels) the
    other cases are for `make test-all` there. Cases that are marked one by one are meant.
    """
    found: set[pytest.Item] = set()
    for cases in _cases_of_tests(items, "quick"):
        alike = [item for item in cases if not any(mark.name == "quick" for mark in item.callspec.marks)]
        mark = cases[0].get_closest_marker("quick")
        assert mark is not None
        wanted = mark.kwargs.get("cases", 1)
        found.update(_left_out(alike, len(alike) if wanted == "all" else wanted))
    return found


def _thin_out_spread(items: list[pytest.Item], not_quick: set[pytest.Item]) -> None:
    """`spread(n)` on a test with many cases, each of which takes seconds, is n of them and what the quick run has; the
    others are slow. They differ in what many tests show: models, mesh axes, shapes of one kernel."""
    for cases in _cases_of_tests(items, "spread"):
        mark = cases[0].get_closest_marker("spread")
        assert mark is not None
        for item in _left_out([item for item in cases if not item.get_closest_marker("slow")], mark.args[0]):
            if item in not_quick or not item.get_closest_marker("quick"):
                item.add_marker(pytest.mark.slow)


def _cases_of_tests(items: list[pytest.Item], mark: str) -> Iterable[list[pytest.Function]]:
    """The cases of each test that has this mark, in their order."""
    found: dict[tuple[str, str], list[pytest.Function]] = {}
    for item in items:
        if isinstance(item, pytest.Function) and hasattr(item, "callspec") and item.get_closest_marker(mark):
            found.setdefault((str(item.path), item.originalname), []).append(item)
    return found.values()


def _left_out(cases: list[pytest.Function], wanted: int) -> list[pytest.Function]:
    """All but so many of the cases: the last, and others as far apart as they can be."""
    kept = {len(cases) - 1 - number * len(cases) // wanted for number in range(min(wanted, len(cases)))}
    return [item for place, item in enumerate(cases) if place not in kept]


_LONG_FILES = ("train/", "doors/", "serve/", "cli/", "test_docs.py", "models/", "kernels/")
"""Files, and folders of files, that have tests of many seconds, the longest first."""


def _long_files_first(items: list[pytest.Item]) -> None:
    """A long test that was begun last would be one worker's, with nothing left for the others."""
    places: dict[Path, int] = {}
    for item in items:
        if item.path not in places:
            name = item.path.relative_to(Path(__file__).parent).as_posix()
            found = (place for place, start in enumerate(_LONG_FILES) if name.startswith(start))
            places[item.path] = next(found, len(_LONG_FILES))
    items.sort(key=lambda item: places[item.path])


def _no_gpu() -> str | None:
    import jax

    return None if jax.default_backend() == "gpu" else "needs an NVIDIA GPU; none is attached"


def _no_tpu_compiler() -> str | None:
    from capibara.compile import tpu_compiler

    compiler = tpu_compiler()
    return None if compiler.available else f"needs the TPU compiler: {compiler}"


@pytest.fixture(autouse=True)
def _own_tuning_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test reads or writes the tuned tables of whoever runs it."""
    monkeypatch.setenv("CAPIBARA_CACHE_DIR", str(tmp_path_factory.getbasetemp() / "cache"))


@pytest.fixture
def nothing_said_yet() -> None:
    """What the library says once a process, it says in this test, whatever ran before."""
    from capibara.errors import say_again

    say_again()


@pytest.fixture
def as_a_reader(_own_tuning_cache: None) -> dict[str, str]:
    """The environment of whoever starts a program that is printed here: no devices but the machine's own."""
    import capibara

    where = str(Path(capibara.__file__).parents[1])  # what the tests import, from any folder
    flags = [flag for flag in os.environ["XLA_FLAGS"].split() if "device_count" not in flag]
    return {**os.environ, "PYTHONPATH": where, "XLA_FLAGS": " ".join(flags)}


_MOST_MAPS = 20_000  # Linux gives a process 65,530 mappings, and XLA dies without a word when there are no more
_finished = 0


def pytest_runtest_logfinish(nodeid: str, location: tuple[str, int | None, str]) -> None:
    """Every compiled program has mappings of its own; a worker that has run thousands of tests lets them go."""
    global _finished
    _finished += 1
    if _finished % 20 or "jax" not in sys.modules or _mappings() < _MOST_MAPS:
        return
    import jax

    jax.clear_caches()
    gc.collect()


def _mappings() -> int:
    try:
        with open("/proc/self/maps", "rb") as maps:
            return sum(1 for _ in maps)
    except OSError:  # no Linux
        return 0


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Debian's Chromium, for the pages that the library serves."""
    playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright: pip install '.[browser]'")
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        pytest.skip("needs Chromium: apt install chromium")
    with playwright.sync_playwright() as driver:
        # Without a sandbox of its own, which containers do not let it have; it sees this server alone.
        running = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield running
        running.close()
