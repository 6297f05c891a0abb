"""The house keeps its shape: imports point one way and in no circle, importing is light, doors hold no logic."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src"

# Each room may import from its own line and the lines above it, also inside of functions. What a type checker alone
# reads may point anywhere.
ORDER = [
    ["_exports", "_version", "distribution", "errors", "lru", "to_come"],
    ["jax_releases", "precision", "processes", "task_states", "toml_tables", "user_file"],
    ["axes"],
    ["hardware"],
    ["kernels"],
    ["mesh"],
    ["program"],
    ["cost"],
    ["compile"],
    ["checkpoints", "parallel", "prices"],
    ["models"],
    ["plan"],
    ["memory", "observe"],
    ["train", "serve"],
    ["dropin", "fleet", "migrate"],
    ["surface"],
    ["cli", "config", "core", "jax", "vq"],
    ["__main__"],
]
LEVEL = {room: level for level, rooms in enumerate(ORDER) for room in rooms}

# The same inside of kernels/.
KERNELS = [["core"], ["pallas"], ["ops"], ["lab"]]

FILES_IN_A_FOLDER = 25


@cache
def _modules() -> dict[str, Path]:
    found = {}
    for path in sorted(SOURCE.rglob("*.py")):
        parts = path.relative_to(SOURCE).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def _for_type_checkers(tree: ast.AST) -> set[ast.AST]:
    return {
        inner
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }


def _imported(path: Path) -> Iterator[tuple[str, int]]:
    """Modules of this repository that a file imports, at its top or inside of a function, and where."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    unread = _for_type_checkers(tree)
    for node in ast.walk(tree):
        if node in unread:
            continue
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            if name.split(".")[0] in ("capibara", "vishwamai"):
                yield name if name in _modules() else name.rpartition(".")[0], node.lineno


@cache
def _graph() -> dict[str, dict[str, int]]:
    return {module: dict(_imported(path)) for module, path in _modules().items()}


def _level(module: str) -> tuple[int, int]:
    parts = [*module.split("."), "", ""]
    inner = next((i for i, rooms in enumerate(KERNELS) if parts[2] in rooms), -1) if parts[1] == "kernels" else 0
    return LEVEL[parts[1]], inner


def test_every_package_is_a_room_of_the_house() -> None:
    rooms = {path.name.removesuffix(".py") for path in (SOURCE / "capibara").iterdir() if path.suffix in ("", ".py")}
    assert not rooms - {"__init__", "__pycache__"} - LEVEL.keys()
    inner = {path.name for path in (SOURCE / "capibara" / "kernels").iterdir() if (path / "__init__.py").exists()}
    assert inner == {room for line in KERNELS for room in line}


@pytest.mark.quick
def test_imports_point_one_way() -> None:
    wrong = []
    for module, imported in _graph().items():
        if module == "capibara" or not module.startswith("capibara."):
            continue
        wrong += [
            f"{module}:{line} imports {name}"
            for name, line in imported.items()
            if name.startswith("capibara.") and _level(name) > _level(module)
        ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.quick
def test_there_are_no_circles() -> None:
    """Also none that is hidden by an import inside of a function."""
    graph = {module: {name for name in imported if name != module} for module, imported in _graph().items()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(f"a circle of imports: {' -> '.join(error.args[1])}")


@pytest.mark.quick
def test_nothing_is_assigned_into_another_module() -> None:
    wrong = []
    for module, path in _modules().items():
        tree = ast.parse(path.read_text(encoding="utf-8"))
        names = {
            alias.asname or alias.name
            for node in tree.body
            if isinstance(node, ast.Import | ast.ImportFrom)
            for alias in node.names
            if isinstance(node, ast.Import) or f"{node.module}.{alias.name}" in _modules()
        }
        for node in ast.walk(tree):
            targets = node.targets if isinstance(node, ast.Assign) else []
            wrong += [
                f"{module}:{node.lineno}: {ast.unparse(target)}"
                for target in targets
                if isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name) and target.value.id in names
            ]
    assert not wrong, "\n".join(wrong)


def _unbounded(decorator: ast.expr) -> bool:
    text = ast.unparse(decorator)
    return text in ("functools.cache", "cache") or ("lru_cache" in text and "maxsize=None" in text)


@pytest.mark.quick
def test_what_is_kept_by_argument_is_bounded() -> None:
    """A server sees millions of shapes. A memo inside of a function goes with it, and may grow as it likes."""
    wrong = []
    for module, path in _modules().items():
        functions = list(ast.parse(path.read_text(encoding="utf-8")).body)
        functions += [inner for node in functions if isinstance(node, ast.ClassDef) for inner in node.body]
        wrong += [
            f"{module}:{node.lineno}: {node.name}"
            for node in functions
            if isinstance(node, ast.FunctionDef)
            if any(map(_unbounded, node.decorator_list)) and ast.unparse(node.args)
        ]
    assert not wrong, "use functools.lru_cache(maxsize=...) or capibara.lru.LRU:\n" + "\n".join(wrong)


def test_folders_are_small_enough_to_read() -> None:
    count = Counter(str(path.parent.relative_to(SOURCE)) for path in _modules().values())
    large = {folder: n for folder, n in count.items() if n > FILES_IN_A_FOLDER}
    assert not large


@pytest.mark.quick
def test_names_that_load_late_are_those_that_type_checkers_see() -> None:
    for module, path in _modules().items():
        tree = ast.parse(path.read_text(encoding="utf-8"))
        if not any(isinstance(node, ast.ImportFrom) and node.module == "capibara._exports" for node in tree.body):
            continue
        seen = {
            (f"{node.module}.{alias.name}", alias.asname)
            for node in _for_type_checkers(tree)
            if isinstance(node, ast.ImportFrom)
            for alias in node.names
        }
        room = importlib.import_module(module)
        assert {name for _, name in seen} == {name for name in room.__all__ if not name.startswith("__")}, module
        assert dir(room) == sorted(room.__all__), module
        for full, name in seen:
            assert name is not None, f"{module}: write `import {full} as ...`, or it is no public name"
            home, _, short = full.rpartition(".")
            value = sys.modules.get(full) or getattr(importlib.import_module(home), short)
            assert getattr(room, name) is value, f"{module}.{name} is not {full}"


def _run(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


@pytest.mark.quick
def test_importing_capibara_imports_nothing_heavy() -> None:
    heavy = "{'jax', 'jaxlib', 'numpy', 'rich', 'typer', 'jaxtyping'}"
    rooms = "capibara.cost, capibara.kernels, capibara.mesh, capibara.models, capibara.parallel, capibara.plan"
    assert _run(f"import sys, {rooms}; print(sorted({heavy} & set(sys.modules)))") == "[]"


def test_importing_capibara_is_quick() -> None:
    """The promise is 0.1 s; of the processor's time, for others may use the machine. The least of five is steady."""
    code = "import time; t = time.process_time(); import capibara; print(time.process_time() - t)"
    seconds = min(float(_run(code)) for _ in range(5))
    assert seconds < 0.1, f"import capibara took {seconds:.3f} s"


@pytest.mark.quick
def test_doors_hold_no_logic() -> None:
    """A door re-exports; its files stay short enough to read at a glance."""
    long = []
    for package in ("capibara/jax", "capibara/core", "capibara/config", "capibara/vq", "vishwamai"):
        for path in sorted((SOURCE / package).rglob("*.py")):
            lines = len(path.read_text(encoding="utf-8").splitlines())
            if lines > 200:
                long.append(f"{path.relative_to(SOURCE)}: {lines} lines")
    assert not long, long
