"""Which values of a function are traced: what its parameters bring, and what is computed of it.

Order is not followed: a name that one assignment gives a traced value is traced in all of the function. Arrays are
told from other traced values: a parameter may be a tuple of arrays, over which a loop is no mistake.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Iterator

from capibara.migrate.module import Module
from capibara.migrate.traced import Function

__all__ = ["ARRAY_MODULES", "TracedValues", "body_of", "jit_keyword", "own_nodes", "parameters", "staged_functions"]

ARRAY_MODULES = ("jax.numpy.", "jax.lax.", "jax.nn.", "jax.random.", "jax.scipy.")
_CALLBACKS = frozenset(
    {
        "jax.pure_callback",
        "jax.debug.callback",
        "jax.experimental.io_callback",
        "jax.experimental.host_callback.call",
        "jax.experimental.host_callback.id_tap",
    }
)
# Parts of what they are given; `jax.tree.map` gives whatever its function does.
_PARTS = frozenset(
    {
        *("jax.tree.leaves", "jax.tree.unflatten", "jax.tree.transpose", "jax.tree_leaves"),
        *("jax.tree_util.tree_leaves", "jax.tree_util.tree_unflatten", "jax.tree_util.tree_transpose"),
    }
)
# Of Python's own, those that give what they are given the sum or the greatest of.
_BUILTINS = frozenset({"sum", "max", "min", "abs"})
# Transformations whose result is called with the arguments of the function.
_CALLED = frozenset(
    {
        *("jax.grad", "jax.value_and_grad", "jax.vmap", "jax.jit", "jax.checkpoint", "jax.remat"),
        *("jax.jacfwd", "jax.jacrev", "jax.hessian"),
    }
)
# Transformations that keep what is no array as it is, so that a parameter may be anything.
_FILTERED = ("equinox.", "flax.")
# Of an array, without its values.
_ABOUT = frozenset({"shape", "ndim", "dtype", "size", "aval", "sharding", "weak_type", "nbytes", "itemsize"})
_NOT_ARRAYS = frozenset(
    {
        *("shape", "ndim", "size", "result_type", "dtype", "issubdtype", "iinfo", "finfo", "isscalar", "promote_types"),
        *("iscomplexobj", "isrealobj", "can_cast", "broadcast_shapes", "get_printoptions", "printoptions", "save"),
        *("axis_size", "psum_scatter_size", "dtypes", "initializers", "default_prng_impl", "key_impl"),
    }
)
# Lists and tuples of arrays.
_SEVERAL = frozenset(
    {
        *("split", "array_split", "hsplit", "vsplit", "dsplit", "unstack", "meshgrid", "broadcast_arrays", "nonzero"),
        *("where", "unravel_index", "divmod", "modf", "frexp", "histogram", "histogram2d", "histogramdd", "gradient"),
        *("atleast_1d", "atleast_2d", "atleast_3d", "ix_", "ogrid", "mgrid", "indices", "tril_indices", "triu_indices"),
        *("eig", "eigh", "svd", "qr", "slogdet", "lstsq", "cond", "switch", "while_loop", "fori_loop", "scan", "map"),
        *("top_k", "sort", "associative_scan", "custom_root", "custom_linear_solve", "psum", "pmean", "pmax", "pmin"),
        *("all_gather", "all_to_all", "ppermute", "stop_gradient", "optimization_barrier", "lu", "reduce", "unique"),
        *("psum_scatter", "pbroadcast", "pvary", "pcast", "schur", "cho_factor", "lu_factor", "polar", "optimize"),
    }
)
_ARRAY_ANNOTATIONS = (
    *("jax.Array", "jax.numpy.ndarray", "chex.Array", "jax.numpy.DeviceArray", "jaxtyping.Array"),
    *("jax.typing.ArrayLike", "chex.ArrayDevice"),
)
_JAXTYPING = ("Float", "Int", "Bool", "Complex", "Num", "Shaped", "Inexact", "Integer", "UInt", "Real", "Key")


class TracedValues:
    """The traced names of one staged function.

    Args:
        given: Of a function that a staged one calls: the parameters that it gives something traced.
        arrays: Those of them that it gives an array.
    """

    def __init__(
        self, module: Module, function: Function, given: Iterable[str] | None = None, arrays: Iterable[str] = ()
    ) -> None:
        self._module = module
        self.function = function
        self.given, self.given_arrays = set(given or ()), set(arrays)
        self.names = set(_traced_parameters(module, function) if given is None else given)
        """Names that hold something traced, arrays or trees of them."""
        self.arrays = {
            one.arg for one in parameters(function) if one.arg in self.names and _is_array_annotation(module, one)
        }
        """Those that are arrays, as far as the text shows."""
        self.arrays |= self.given_arrays
        nodes = list(own_nodes(function.node))
        self._read_uses(nodes)
        assignments = [node for node in nodes if isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign)]
        while self._follow(assignments):
            pass

    def _read_uses(self, nodes: list[ast.AST]) -> None:
        """A parameter whose shape is asked for, or that is multiplied as a matrix, is an array."""
        for node in nodes:
            if isinstance(node, ast.Attribute) and node.attr in ("shape", "ndim", "at", "T", "dtype", "astype"):
                operands: tuple[ast.expr, ...] = (node.value,)
            elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.MatMult):
                operands = (node.left, node.right)
            else:
                continue
            self.arrays |= {one.id for one in operands if isinstance(one, ast.Name) and one.id in self.names}

    def _follow(self, assignments: list[ast.Assign | ast.AnnAssign | ast.AugAssign]) -> bool:
        before = len(self.names) + len(self.arrays)
        for node in assignments:
            if node.value is None:
                continue
            traced, array = self.is_traced(node.value), self.is_array(node.value)
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                if isinstance(target, ast.Name):
                    self.names |= {target.id} if traced else set()
                    self.arrays |= {target.id} if array else set()
                elif traced and isinstance(target, ast.Tuple | ast.List):
                    self.names |= {one.id for one in target.elts if isinstance(one, ast.Name)}
                    if self._gives_a_value_first(node.value) and isinstance(target.elts[0], ast.Name):
                        self.arrays.add(target.elts[0].id)
        return len(self.names) + len(self.arrays) > before

    def is_traced(self, node: ast.expr) -> bool:
        """Whether the value hangs on what the function was given, and not only on its shape."""
        match node:
            case ast.Name():
                return node.id in self.names
            case ast.Attribute():
                return node.attr not in _ABOUT and self.is_traced(node.value)
            case ast.Subscript():
                return self.is_traced(node.value) or self._traced_index(node.slice)
            case ast.BinOp():
                return self.is_traced(node.left) or self.is_traced(node.right)
            case ast.UnaryOp():
                return self.is_traced(node.operand)
            case ast.BoolOp():
                return any(map(self.is_traced, node.values))
            case ast.Compare():
                if any(isinstance(one, ast.Is | ast.IsNot | ast.In | ast.NotIn) for one in node.ops):
                    return False
                return any(map(self.is_traced, (node.left, *node.comparators)))
            case ast.IfExp():
                return self.is_traced(node.body) or self.is_traced(node.orelse)
            case ast.Tuple() | ast.List():
                return any(map(self.is_traced, node.elts))
            case ast.Starred():
                return self.is_traced(node.value)
            case ast.ListComp() | ast.GeneratorExp():
                return self._in_comprehension(node, self.is_traced)
            case ast.Call():
                return self._traced_call(node)
        return False

    def _in_comprehension(self, node: ast.ListComp | ast.GeneratorExp, ask: Callable[[ast.expr], bool]) -> bool:
        """What is asked of a comprehension's element, where its own names stand for parts of what is traced."""
        own = {
            name.id
            for generator in node.generators
            if self.is_traced(generator.iter)
            for name in ast.walk(generator.target)
            if isinstance(name, ast.Name)
        } - self.names
        self.names |= own
        try:
            return ask(node.elt)
        finally:
            self.names -= own

    def _traced_index(self, node: ast.expr) -> bool:
        return self.is_array(node)

    def _traced_call(self, node: ast.Call) -> bool:
        path = self._module.resolve(node.func)
        inputs = [*node.args, *(one.value for one in node.keywords)]
        if path is not None:
            # Only jax's own functions are known to give arrays for arrays; others may ask about them.
            return (_gives_arrays(path) or path in _PARTS) and any(map(self.is_traced, inputs))
        if isinstance(node.func, ast.Name) and node.func.id in _BUILTINS and not self._module.bindings_of(node.func):
            return any(map(self.is_traced, inputs))
        if transformed(self._module, node) is not None:
            return any(map(self.is_traced, inputs))
        # A method of an array.
        return isinstance(node.func, ast.Attribute) and self.is_array(node.func.value)

    def is_array(self, node: ast.expr) -> bool:
        """Whether it is one traced array, and no tuple or tree of them."""
        match node:
            case ast.Name():
                return node.id in self.arrays
            case ast.BinOp():
                return self.is_array(node.left) or self.is_array(node.right)
            case ast.UnaryOp():
                return not isinstance(node.op, ast.Not) and self.is_array(node.operand)
            case ast.Compare():
                return self.is_traced(node) and any(map(self.is_array, (node.left, *node.comparators)))
            case ast.Subscript():
                return self.is_array(node.value)
            case ast.Attribute():
                return node.attr in ("T", "mT", "real", "imag") and self.is_array(node.value)
            case ast.Call():
                return self._array_call(node)
            case ast.ListComp() | ast.GeneratorExp():  # of `sum(...)`: whether each is one
                return self._in_comprehension(node, self.is_array)
        return False

    def _array_call(self, node: ast.Call) -> bool:
        path = self._module.resolve(node.func)
        if path is not None:
            return self._traced_call(node) and path not in _PARTS and path.rpartition(".")[2] not in _SEVERAL
        if isinstance(node.func, ast.Name) and node.func.id in _BUILTINS:
            return self._traced_call(node) and any(map(self.is_array, node.args))
        is_method = isinstance(node.func, ast.Attribute) and node.func.attr not in ("item", "tolist")
        return is_method and transformed(self._module, node) is None and self._traced_call(node)

    def _gives_a_value_first(self, node: ast.expr) -> bool:
        """`loss, grads = jax.value_and_grad(f)(…)`: the loss is one array."""
        call = transformed(self._module, node) if isinstance(node, ast.Call) else None
        if call is None or self._module.resolve(call.func) != "jax.value_and_grad":
            return False
        return not any(one.arg in ("has_aux", None) for one in call.keywords)


def _gives_arrays(path: str) -> bool:
    return path.startswith(ARRAY_MODULES) and path.rpartition(".")[2] not in _NOT_ARRAYS


def parameters(function: Function) -> list[ast.arg]:
    """All of them but *args and **kwargs, those by position first."""
    arguments = function.node.args
    return [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]


def jit_keyword(function: Function, *names: str) -> list[ast.expr]:
    """What the transformation is given under these keywords."""
    return [one.value for one in function.call.keywords if one.arg in names] if function.call is not None else []


def _traced_parameters(module: Module, function: Function) -> Iterator[str]:
    if _is_inside(function):
        return  # called by the traced function with whatever it likes
    if (function.transform or "").startswith(_FILTERED):
        return
    if any(one.arg is None for one in (function.call.keywords if function.call is not None else ())):
        return  # **options: some may be static
    static = static_parameters(function)
    if static is None:
        return
    for one in parameters(function):
        if one.arg not in static and one.arg not in ("self", "cls") and not _is_plain(module, one, function):
            yield one.arg


def _is_inside(function: Function) -> bool:
    return function.call is None and function.why.startswith("inside ")


def static_parameters(function: Function) -> set[str] | None:
    """The names that static_argnums and static_argnames make static; None where the text does not say which."""
    positional = [one.arg for one in (*function.node.args.posonlyargs, *function.node.args.args)]
    static: set[str] = set()
    for value in jit_keyword(function, "static_argnums", "static_broadcasted_argnums", "nondiff_argnums"):
        numbers = literal(value)
        if numbers is None:
            return None
        for number in numbers if isinstance(numbers, tuple | list) else (numbers,):
            if isinstance(number, int) and -len(positional) <= number < len(positional):
                static.add(positional[number])
    for value in jit_keyword(function, "static_argnames"):
        names = literal(value)
        if names is None:
            return None
        static |= {names} if isinstance(names, str) else set(names) if isinstance(names, tuple | list) else set()
    return static


def literal(node: ast.expr) -> object:
    """The value of a literal; None where it is none."""
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return None


def _is_plain(module: Module, parameter: ast.arg, function: Function) -> bool:
    """Annotated as what no tracer is, or with such a default: whoever wrote it knows that it is static."""
    annotation = parameter.annotation
    if annotation is not None:
        text = ast.unparse(annotation)
        if any(word in text for word in ("str", "bool", "Callable", "int", "Config", "Mesh", "type", "Module")):
            return not any(word in text for word in ("Array", "ndarray", "ArrayLike", "Tree"))
    default = _default(parameter, function)
    return isinstance(default, ast.Constant) and isinstance(default.value, str | bool | type(None) | int)


def _default(parameter: ast.arg, function: Function) -> ast.expr | None:
    arguments = function.node.args
    positional = [*arguments.posonlyargs, *arguments.args]
    if parameter in positional:
        place = positional.index(parameter) - (len(positional) - len(arguments.defaults))
        return arguments.defaults[place] if place >= 0 else None
    return arguments.kw_defaults[arguments.kwonlyargs.index(parameter)]


def _is_array_annotation(module: Module, parameter: ast.arg) -> bool:
    annotation = parameter.annotation
    if isinstance(annotation, ast.Subscript):  # Float[Array, "batch features"]
        return (module.resolve(annotation.value) or "").removeprefix("jaxtyping.") in _JAXTYPING
    return annotation is not None and module.resolve(annotation) in _ARRAY_ANNOTATIONS


def body_of(node: ast.AST) -> list[ast.AST]:
    """The statements of a function, or a lambda's expression."""
    body = getattr(node, "body", [])
    return list(body) if isinstance(body, list) else [body]


def own_nodes(node: ast.AST) -> Iterator[ast.AST]:
    """Every node that runs when the function does: not those of functions and classes inside of it."""
    stack = body_of(node)[::-1]
    while stack:
        inner = stack.pop()
        yield inner
        if not isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef):
            stack.extend(reversed(list(ast.iter_child_nodes(inner))))


def transformed(module: Module, node: ast.Call) -> ast.Call | None:
    """`jax.grad(f)` of `jax.grad(f)(x)`, and of `g(x)` where g is that; None for other calls."""
    made: ast.AST | None = node.func
    if isinstance(made, ast.Name):
        bindings = module.bindings_of(made)
        made = bindings[0].value if len(bindings) == 1 else None
    if not isinstance(made, ast.Call) or module.resolve(made.func) not in _CALLED:
        return None
    return made


def staged_functions(module: Module) -> Iterator[TracedValues]:
    """Functions that jax runs with tracers in place of values, but for those that a callback runs on the host.

    Functions of this module that those call are among them, with the parameters that they are given traced values.
    """
    on_host = _callback_functions(module)
    staged: dict[ast.AST, TracedValues] = {}
    for function in module.functions:
        if function.staged and not _runs_on_host(module, function.node, on_host):
            staged[function.node] = TracedValues(module, function)
    # What those parameters are of a function inside of a staged one, its calls say.
    direct = frozenset(node for node, one in staged.items() if not _is_inside(one.function))
    waiting = list(staged.values())
    while waiting:
        caller = waiting.pop()
        for callee, names, arrays in _given(module, caller):
            known = staged.get(callee.node)
            if callee.node in direct or not names or _runs_on_host(module, callee.node, on_host):
                continue
            before = (set(), set()) if known is None else (known.given, known.given_arrays)
            if names <= before[0] and arrays <= before[1]:
                continue
            why = f"called by {caller.function.name}, {caller.function.why}" if known is None else known.function.why
            function = Function(callee.node, callee.name, caller.function.transform, None, why)
            staged[callee.node] = TracedValues(module, function, names | before[0], arrays | before[1])
            waiting.append(staged[callee.node])
    yield from staged.values()


def _given(module: Module, caller: TracedValues) -> Iterator[tuple[Function, set[str], set[str]]]:
    """The functions of this module that one calls, and which of their parameters get something traced, or an array."""
    for node in own_nodes(caller.function.node):
        if not isinstance(node, ast.Call):
            continue
        made = transformed(module, node)
        called = node.func if made is None else made.args[0] if made.args else None
        callee = module.function_named(called) if isinstance(called, ast.Name) else None
        if callee is None:
            continue
        names: set[str] = set()
        arrays: set[str] = set()
        positional = [one.arg for one in (*callee.node.args.posonlyargs, *callee.node.args.args)]
        pairs = list(zip(positional, node.args, strict=False))
        pairs += [(one.arg, one.value) for one in node.keywords if one.arg is not None]
        for name, argument in pairs:
            if isinstance(argument, ast.Starred):
                break
            array = caller.is_array(argument)
            # A field of a traced object may be static: `grid.shape_of_blocks`.
            traced = array or (caller.is_traced(argument) and not isinstance(argument, ast.Attribute))
            names |= {name} if traced else set()
            arrays |= {name} if array else set()
        yield callee, names, arrays


def _runs_on_host(module: Module, node: ast.AST, on_host: set[ast.AST]) -> bool:
    above: ast.AST | None = node
    while above is not None and above not in on_host:
        above = module.parent(above)
    return above is not None


def _callback_functions(module: Module) -> set[ast.AST]:
    found: set[ast.AST] = set()
    for call in module.calls:
        if module.resolve(call.func) not in _CALLBACKS:
            continue
        for argument in (*call.args[:1], *(one.value for one in call.keywords if one.arg in ("callback", "func"))):
            if isinstance(argument, ast.Name):
                found |= {one.node for one in module.bindings_of(argument)}
            else:
                found.add(argument)
    return found
