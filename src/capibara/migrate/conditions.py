"""Conditions that ask which jax this is, or what it has, and what they are on the newest one."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from capibara.jax_releases import RELEASES, find
from capibara.migrate.fates import OLDEST, fate
from capibara.migrate.module import Module
from capibara.migrate.scopes import Binding

__all__ = ["asks", "caught", "compared_as_text", "fails", "last_name", "names_jax", "of_jax", "truth"]

_TELLING = re.compile(
    r"__version(_info)?__|(?i:jax\w*(version|compat)|(version|legacy|old|new)\w*_jax)"
    r"|^_*(HAS|HAVE|USE_NEW|USE_OLD|IS_OLD|IS_NEW|SUPPORTS)_(?!JAX$)|VERSION"
)
"""Names that tell the release. `HAS_JAX` and `is_jax_available` tell only that there is one: every jax breaks there."""
_VERSIONS = frozenset({"jax.__version__", "jax.version.__version__"})
_TUPLES = frozenset({"jax.__version_info__", "jax.version.__version_info__"})
_FOLLOWED = 3
_COMPARED: dict[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
}
_NOT_THERE = frozenset({"ImportError", "ModuleNotFoundError", "AttributeError"})


def last_name(node: ast.AST) -> str:
    """`d` of `a.b.d`; empty for what is no name."""
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def caught(handler: ast.ExceptHandler) -> list[str]:
    """The exceptions that a handler takes, by their last names; "" for all of them."""
    if handler.type is None:
        return [""]
    types = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    return [last_name(one) for one in types if last_name(one)]


# Which jax is asked for.


def asks(module: Module, test: ast.AST, depth: int = 0) -> str | None:
    """Whether a condition asks which jax this is, or what it has: by what, in words."""
    for part in ast.walk(test):
        if isinstance(part, ast.Call):
            reason = _call_asks(module, part)
        elif isinstance(part, ast.Constant) and isinstance(part.value, str) and part.value.startswith("jax."):
            reason = f"a test of {part.value!r}"  # "jax.experimental.maps" in sys.modules
        elif isinstance(part, ast.Name | ast.Attribute):
            reason = _name_asks(module, part, depth)
        else:
            reason = None
        if reason is not None:
            return reason
    return None


def _call_asks(module: Module, call: ast.Call) -> str | None:
    name = last_name(call.func)
    first = call.args[0] if call.args else None
    if first is None:
        return None
    if name in ("hasattr", "getattr", "signature") and of_jax(module, first):
        return f"{name}(…)"
    second = call.args[1] if name == "hasattr" and len(call.args) == 2 else None
    if isinstance(second, ast.Constant) and str(second.value).startswith("__array_"):
        return "hasattr(…)"  # of an array of whichever library: what it follows is a matter of its release
    text = first.value if isinstance(first, ast.Constant) else None
    return f'{name}("{text}")' if name in ("version", "get_distribution") and text in ("jax", "jaxlib") else None


def of_jax(module: Module, node: ast.AST, depth: int = 0) -> bool:
    """Whether an expression is a thing of jax, or a value that jax gave: `aval = jax.typeof(x)` has what its release
    gives it. An argument, an option or a model of the program's own does not tell the release."""
    path = module.resolve(node)
    if path is not None:
        return path.partition(".")[0] in ("jax", "jaxlib")
    if isinstance(node, ast.Call):
        return of_jax(module, node.func, depth)
    if isinstance(node, ast.Attribute | ast.Subscript):
        return of_jax(module, node.value, depth)
    if isinstance(node, ast.Name) and depth < _FOLLOWED:
        values = [one.value for one in module.bindings_of(node) if one.value is not None]
        return any(of_jax(module, value, depth + 1) for value in values)
    return False


def _name_asks(module: Module, node: ast.Name | ast.Attribute, depth: int) -> str | None:
    name = last_name(node)
    if name == "TYPE_CHECKING":
        return name
    values = []
    if isinstance(node, ast.Name):
        bindings = module.bindings_of(node)
        values = [one.value for one in bindings if one.value is not None]
        if depth < _FOLLOWED:
            for value in values:
                if (reason := asks(module, value, depth + 1)) is not None:
                    return reason
            for binding in bindings:
                if _set_by_a_try(module, binding.node):
                    return f"a test of {name}, which a try sets"
    package = (module.resolve(node) or "jax").partition(".")[0]
    of_another = name.startswith("__version") and package not in ("jax", "jaxlib")
    # A name whose value stands in this module was looked at above.
    return f"a test of {name}" if _TELLING.search(name) and not values and not of_another else None


def _set_by_a_try(module: Module, statement: ast.AST) -> bool:
    """`new = False` where a try of something of jax failed."""
    handler = module.parent(statement)
    tried = module.parent(handler) if handler is not None else None
    if not isinstance(handler, ast.ExceptHandler) or not isinstance(tried, ast.Try | ast.TryStar):
        return False
    return bool(set(caught(handler)) & _NOT_THERE) and names_jax(module, tried.body)


def _flag(module: Module, bindings: Sequence[Binding]) -> bool | None:
    """Of a name that a try and its handler set: what it is where the try works as the newest jax lets it."""
    found: dict[ast.AST, dict[bool, object]] = {}
    for binding in bindings:
        above = module.parent(binding.node)
        in_handler = isinstance(above, ast.ExceptHandler)
        tried = module.parent(above) if in_handler and above is not None else above
        if not isinstance(tried, ast.Try | ast.TryStar) or not isinstance(binding.value, ast.Constant):
            return None
        found.setdefault(tried, {})[in_handler] = binding.value.value
    if len(found) != 1:
        return None
    ((tried, values),) = found.items()
    assert isinstance(tried, ast.Try | ast.TryStar)
    paths = [path for path, _ in _named(module, tried.body)]
    if set(values) != {True, False} or not paths or any(path.partition(".")[0] != "jax" for path in paths):
        return None  # another package may be there or not
    return bool(values[fails(module, tried.body)])


# What a block of statements needs of jax.


def _named(module: Module, statements: Iterable[ast.AST]) -> Iterator[tuple[str, bool]]:
    """Every path of jax that statements name, and whether it is imported as a module."""
    for statement in statements:
        for node in ast.walk(statement):
            if isinstance(node, ast.Import):
                yield from ((alias.name, True) for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
                yield node.module, True
                yield from ((f"{node.module}.{alias.name}", False) for alias in node.names if alias.name != "*")
            elif isinstance(node, ast.Attribute) and (path := module.resolve(node)) is not None:
                yield path, False


def names_jax(module: Module, statements: Iterable[ast.AST]) -> bool:
    """Whether statements import something of jax, or take it from there."""
    return any(path.partition(".")[0] in ("jax", "jaxlib") for path, _ in _named(module, statements))


def fails(module: Module, statements: Iterable[ast.AST]) -> bool:
    """Whether statements name something that the newest jax does not have."""
    for path, as_module in _named(module, statements):
        if path.startswith("jax."):
            one = fate(path, as_module=as_module)
            if one is not None and one.removed is not None:
                return True
    return False


# What a condition is.


def truth(module: Module, test: ast.AST, depth: int = 0) -> bool | None:
    """What a condition is on the newest jax of the table, when the program runs; None where the text does not say."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        inner = truth(module, test.operand, depth)
        return None if inner is None else not inner
    if isinstance(test, ast.BoolOp):
        parts = [truth(module, value, depth) for value in test.values]
        decisive = isinstance(test.op, ast.Or)  # one True makes an `or`, one False an `and`
        return decisive if decisive in parts else None if None in parts else not decisive
    if isinstance(test, ast.Compare) and len(test.ops) == 1:
        return _compared(module, test)
    if isinstance(test, ast.Call) and last_name(test.func) == "hasattr" and len(test.args) == 2:
        return _has(module, *test.args)
    if isinstance(test, ast.Name | ast.Attribute):
        if last_name(test) == "TYPE_CHECKING":
            return False
        bindings = module.bindings_of(test) if isinstance(test, ast.Name) else []
        if len(bindings) == 1 and bindings[0].value is not None and depth < _FOLLOWED:
            return truth(module, bindings[0].value, depth + 1)
        return _flag(module, bindings) if len(bindings) == 2 else None
    return None


def _has(module: Module, owner: ast.expr, name: ast.expr) -> bool | None:
    path = module.resolve(owner)
    text = name.value if isinstance(name, ast.Constant) else None
    if path is None or path.partition(".")[0] != "jax" or not isinstance(text, str):
        return None
    whole = f"{path}.{text}"
    history = find(whole)
    if history is not None:
        return history.removed is None
    one = fate(whole)
    return False if one is not None and one.removed is not None else None


def _compared(module: Module, test: ast.Compare) -> bool | None:
    """A comparison of jax's version with one that is written there."""
    compare = _COMPARED.get(type(test.ops[0]))
    left, right = test.left, test.comparators[0]
    sides = [_newest(module, left) or _written(left), _newest(module, right) or _written(right)]
    if compare is None or None in sides or len([one for one in (left, right) if _newest(module, one)]) != 1:
        return None
    one, other = sides
    assert one is not None
    assert other is not None
    if isinstance(one, str) and isinstance(other, str):
        # Python compares texts letter by letter, "0.12" before "0.4": said only where that is what was meant.
        as_text, meant = compare(one, other), compare(_numbers(one), _numbers(other))
        return as_text if as_text == meant else None
    return compare(_numbers(one), _numbers(other))


def compared_as_text(module: Module) -> Iterator[tuple[ast.Compare, str | None]]:
    """Comparisons of jax's version as a text with one that is written there, and the newest supported release that
    they get wrong; None where letters and numbers say the same on all of them."""
    supported = RELEASES[RELEASES.index(OLDEST) :]
    for test in module.nodes(ast.Compare):
        if not isinstance(test, ast.Compare) or len(test.ops) != 1:
            continue
        compare = _COMPARED.get(type(test.ops[0]))
        if compare is None or compare in (operator.eq, operator.ne):
            continue
        left, right = test.left, test.comparators[0]
        is_left = isinstance(_newest(module, left), str)
        if is_left == isinstance(_newest(module, right), str):
            continue
        other = _written(right if is_left else left)
        if not isinstance(other, str):
            continue
        wrong = None
        for release in supported:
            sides = (release, other) if is_left else (other, release)
            if compare(*sides) != compare(*map(_numbers, sides)):
                wrong = release
        yield test, wrong


def _newest(module: Module, node: ast.AST, depth: int = 0) -> str | tuple[int, ...] | None:
    """The newest release, where an expression is jax's version: a text, or numbers."""
    path = module.resolve(node)
    if path in _VERSIONS:
        return RELEASES[-1]
    if path in _TUPLES:
        return _numbers(RELEASES[-1])
    if isinstance(node, ast.Name) and depth < _FOLLOWED:
        bindings = module.bindings_of(node)
        if len(bindings) == 1 and bindings[0].value is not None:
            return _newest(module, bindings[0].value, depth + 1)
    if isinstance(node, ast.Subscript):
        whole = _newest(module, node.value, depth)
        upper = node.slice.upper if isinstance(node.slice, ast.Slice) and node.slice.lower is None else None
        if isinstance(whole, tuple) and isinstance(upper, ast.Constant) and isinstance(upper.value, int):
            return whole[: upper.value]
        return None
    if isinstance(node, ast.Call) and len(node.args) == 1 and not node.keywords:  # Version(jax.__version__)
        inner = _newest(module, node.args[0], depth)
        return None if inner is None else _numbers(inner)
    return None


def _written(node: ast.AST) -> str | tuple[int, ...] | None:
    if isinstance(node, ast.Call) and len(node.args) == 1 and not node.keywords:  # Version("0.4.30")
        inner = _written(node.args[0])
        return None if inner is None else _numbers(inner)
    try:
        value = ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return None
    if isinstance(value, str):
        return value if re.match(r"\d+\.\d", value) else None
    numbers = tuple(value) if isinstance(value, tuple | list) else ()
    return numbers if numbers and all(type(one) is int for one in numbers) else None


def _numbers(version: str | tuple[int, ...]) -> tuple[int, ...]:
    """As numbers; a text has three of them, as jax's releases do."""
    if not isinstance(version, str):
        return version
    match = re.match(r"\d+(\.\d+)*", version)
    numbers = tuple(int(part) for part in match[0].split(".")) if match else ()
    return (*numbers, *(0,) * (3 - len(numbers)))
