"""CAP306: a PRNG key that is drawn from twice: the second draw has the numbers of the first, or goes with them.

Statements are followed in their order: a branch of an if on its own, a loop's body twice, and what comes after a
return not at all. A key is used up by what draws from it and by split, is another one after it is bound anew, and may
be folded with as many numbers as one likes.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from capibara.migrate.findings import Finding
from capibara.migrate.module import Module

__all__ = ["check_keys"]

# Of jax.random, what does not draw from the key that it is given.
_KEEPS = frozenset(
    {
        *(
            "PRNGKey",
            "key",
            "fold_in",
            "key_data",
            "key_impl",
            "wrap_key_data",
            "clone",
            "default_prng_impl",
            "KeyArray",
        ),
        *("PRNGKeyArray", "key_reuse", "unsafe_rbg_key", "threefry_2x32", "prng_impl", "get_state"),
    }
)
_Functions = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda


@dataclass(frozen=True)
class _Use:
    """Where a key was drawn from."""

    node: ast.Call
    certain: bool = True
    """Not so after an if of which only one branch drew."""


@dataclass
class _State:
    """Keys that are used up here. `ended`: nothing runs after this."""

    used: dict[str, _Use] = field(default_factory=dict)
    ended: bool = False

    def copy(self) -> _State:
        return _State(dict(self.used), self.ended)


class _Walk:
    """The statements of one function, in the order in which they run."""

    def __init__(self, module: Module) -> None:
        self._module = module
        self.found: dict[ast.Call, str] = {}
        """A second draw -> what is wrong with it."""
        self._branches = 0
        """How many ifs are around the statement."""

    # Statements.

    def run(self, statements: Iterable[ast.stmt], state: _State) -> None:
        for statement in statements:
            if state.ended:
                return
            self._statement(statement, state)

    def _statement(self, node: ast.stmt, state: _State) -> None:
        match node:
            case ast.If():
                self._expression(node.test, state)
                self._join(state, [node.body, node.orelse])
            case ast.Match():
                self._expression(node.subject, state)
                self._join(state, [one.body for one in node.cases] + [[]])
            case ast.For() | ast.AsyncFor():
                self._expression(node.iter, state)
                self._loop(node.body, node.orelse, state, node.target)
            case ast.While():
                self._expression(node.test, state)
                self._loop(node.body, node.orelse, state, None)
            case ast.Try() | ast.TryStar():
                before = state.copy()
                self.run([*node.body, *node.orelse], state)
                ends = [state.copy()]
                for handler in node.handlers:
                    ends.append(before.copy())
                    self.run(handler.body, ends[-1])
                _merge(state, ends)
                final = _State(dict(state.used))
                self.run(node.finalbody, final)
                state.used, state.ended = final.used, state.ended or final.ended
            case ast.With() | ast.AsyncWith():
                for item in node.items:
                    self._expression(item.context_expr, state)
                    if item.optional_vars is not None:
                        self._bind(item.optional_vars, state)
                self.run(node.body, state)
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                state.used.pop(node.name, None)  # its body runs elsewhere
            case ast.Return() | ast.Raise() | ast.Break() | ast.Continue():
                for child in ast.iter_child_nodes(node):
                    if isinstance(child, ast.expr):
                        self._expression(child, state)
                state.ended = True
            case ast.Assign() | ast.AnnAssign() | ast.AugAssign():
                if node.value is not None:
                    self._expression(node.value, state)
                for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                    self._bind(target, state)
            case ast.Delete():
                for target in node.targets:
                    self._bind(target, state)
            case ast.Expr() | ast.Assert():
                for child in ast.iter_child_nodes(node):
                    if isinstance(child, ast.expr):
                        self._expression(child, state)

    def _join(self, state: _State, branches: list[list[ast.stmt]]) -> None:
        self._branches += 1
        ends = []
        for branch in branches:
            ends.append(state.copy())
            self.run(branch, ends[-1])
        self._branches -= 1
        _merge(state, ends)

    def _loop(self, body: list[ast.stmt], otherwise: list[ast.stmt], state: _State, target: ast.expr | None) -> None:
        if target is not None:
            self._bind(target, state)
        outside = self._branches
        self._branches = 0  # what an if in the body does, it may do in every iteration
        after = state.copy()
        self.run(body, after)
        if not after.ended or _continues(body):
            again = _State(dict(after.used.items()))
            if target is not None:
                self._bind(target, again)
            self.run(body, again)
        self._branches = outside
        ended = after.ended and not _continues(body) and not _breaks(body)
        _merge(state, [state.copy(), _State(after.used)] if not ended else [state.copy()])
        self.run(otherwise, state)

    def _bind(self, target: ast.expr, state: _State) -> None:
        """What is bound anew is another key, and so is what is a part of it."""
        if isinstance(target, ast.Tuple | ast.List):
            for one in target.elts:
                self._bind(one, state)
        elif isinstance(target, ast.Starred):
            self._bind(target.value, state)
        else:
            name = ast.unparse(target) if isinstance(target, ast.Subscript) else _name(target)
            if name is not None:
                for key in [one for one in state.used if one == name or one.startswith((f"{name}[", f"{name}."))]:
                    del state.used[key]

    # Expressions, in the order in which Python evaluates them.

    def _expression(self, node: ast.expr, state: _State) -> None:
        match node:
            case ast.Lambda():
                return  # runs elsewhere
            case ast.IfExp():
                self._expression(node.test, state)
                ends = []
                self._branches += 1
                for branch in (node.body, node.orelse):
                    ends.append(state.copy())
                    self._expression(branch, ends[-1])
                self._branches -= 1
                _merge(state, ends)
            case ast.NamedExpr():
                self._expression(node.value, state)
                self._bind(node.target, state)
            case ast.ListComp() | ast.SetComp() | ast.GeneratorExp() | ast.DictComp():
                self._comprehension(node, state)
            case _:
                for child in ast.iter_child_nodes(node):
                    if isinstance(child, ast.keyword):
                        self._expression(child.value, state)
                    elif isinstance(child, ast.expr):
                        self._expression(child, state)
                if isinstance(node, ast.Call):
                    self._draw(node, state)
                    self._may_change(node, state)

    def _may_change(self, node: ast.Call, state: _State) -> None:
        """A method may give its object another key, and so may a function that is given the object: `self.step()`."""
        owner = node.func.value if isinstance(node.func, ast.Attribute) else None
        for one in (owner, *node.args):
            if isinstance(one, ast.Name):
                for key in [key for key in state.used if key.startswith(f"{one.id}.")]:
                    del state.used[key]

    def _comprehension(self, node: ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp, state: _State) -> None:
        self._expression(node.generators[0].iter, state)
        elements = [node.key, node.value] if isinstance(node, ast.DictComp) else [node.elt]
        conditions = [one for generator in node.generators for one in generator.ifs]
        inner = state.copy()
        for _ in range(2):
            for generator in node.generators:
                self._bind(generator.target, inner)
            for element in (*conditions, *elements):
                self._expression(element, inner)
        # Its own names end with it.
        for generator in node.generators:
            self._bind(generator.target, inner)
        state.used = inner.used

    def _draw(self, node: ast.Call, state: _State) -> None:
        path = self._module.resolve(node.func) or ""
        prefix, _, function = path.rpartition(".")
        if prefix != "jax.random" or function in _KEEPS or not function.islower():
            return
        given = node.args[0] if node.args else next((one.value for one in node.keywords if one.arg == "key"), None)
        key = _name(given) if given is not None else None
        if key is None:
            return
        before = state.used.get(key)
        if (
            before is not None
            and (before.certain or not self._branches)
            and not _opposed(before.node, node, self._module)
        ):
            self.found.setdefault(node, _said(key, before.node, node))
        state.used[key] = _Use(node)


def _said(key: str, first: ast.Call, second: ast.Call) -> str:
    if first is second:
        return f"`{key}` is drawn from in every iteration: the numbers are the same each time"
    return f"`{key}` was drawn from in line {first.lineno}: these numbers are not independent of those"


def _name(node: ast.expr) -> str | None:
    """`key`, `state.key`, `keys[0]`; None for what may be another one each time."""
    match node:
        case ast.Name():
            return node.id
        case ast.Attribute():
            base = _name(node.value)
            return None if base is None else f"{base}.{node.attr}"
        case ast.Subscript(slice=ast.Constant(value=int() | str())):
            base = _name(node.value)
            return None if base is None else ast.unparse(node)
    return None


def _merge(state: _State, ends: list[_State]) -> None:
    """What is used up after one of several ways was gone."""
    running = [one for one in ends if not one.ended]
    if not running:
        state.ended = True
        return
    used: dict[str, _Use] = {}
    for key in dict.fromkeys(key for one in running for key in one.used):
        uses = [one.used.get(key) for one in running]
        certain = all(use is not None and use.certain for use in uses)
        node = next(use.node for use in uses if use is not None)
        used[key] = _Use(node, certain)
    state.used, state.ended = used, False


def _opposed(first: ast.Call, second: ast.Call, module: Module) -> bool:
    """In two branches of one if or one conditional expression, of which only one runs, iteration by iteration."""
    return (
        False
        if first is second
        else _branch(first, module) != _branch(second, module) and _share(first, second, module)
    )


def _branch(node: ast.AST, module: Module) -> dict[ast.AST, str]:
    """Each if around a node -> in which of its parts the node is."""
    found: dict[ast.AST, str] = {}
    below, above = node, module.parent(node)
    while above is not None and not isinstance(above, _Functions):
        if isinstance(above, ast.If | ast.IfExp):
            body = above.body if isinstance(above.body, list) else [above.body]
            found[above] = "body" if below in body else "else"
        below, above = above, module.parent(above)
    return found


def _share(first: ast.Call, second: ast.Call, module: Module) -> bool:
    """Whether an if has one of them in its body and the other in its else."""
    one, other = _branch(first, module), _branch(second, module)
    return any(one[node] != other[node] for node in one.keys() & other.keys())


def _continues(body: list[ast.stmt]) -> bool:
    return any(isinstance(one, ast.Continue) for one in _of_loop(body))


def _breaks(body: list[ast.stmt]) -> bool:
    return any(isinstance(one, ast.Break) for one in _of_loop(body))


def _of_loop(body: list[ast.stmt]) -> Iterator[ast.AST]:
    stack: list[ast.AST] = list(body)
    while stack:
        node = stack.pop()
        yield node
        if not isinstance(node, ast.For | ast.AsyncFor | ast.While | _Functions | ast.ClassDef):
            stack.extend(ast.iter_child_nodes(node))


def check_keys(module: Module) -> Iterator[Finding]:
    """Of every function, and of the module's own statements."""
    if "random" not in module.source:
        return
    bodies = [module.tree.body]
    for function in module.functions:
        body = function.node.body
        bodies.append(body if isinstance(body, list) else [ast.copy_location(ast.Expr(body), body)])
    for body in bodies:
        walk = _Walk(module)
        walk.run(body, _State())
        for node, message in walk.found.items():
            fix = "draw from its own key: key, subkey = jax.random.split(key)"
            yield module.finding(node, "CAP306", message, fix)
