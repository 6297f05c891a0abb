"""Cross-entropy over a vocabulary: what the documents promise, beyond what every op must pass."""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from capibara.kernels import explain, target
from capibara.kernels.lab.check import check_output, expected
from capibara.kernels.ops.layers import CROSS_ENTROPY, CROSS_ENTROPY_GRAD, cross_entropy
from capibara.kernels.ops.layers.cross_entropy.api import GRADIENTS
from capibara.kernels.ops.layers.cross_entropy.in_forward import chunk_tokens
from capibara.kernels.ops.layers.cross_entropy.xla import chunk_columns

IGNORED = -100


def _draw(lead: tuple[int, ...], depth: int, vocabulary: int, dtype: str = "float32") -> tuple[Any, Any, Any]:
    generator = np.random.default_rng((*lead, depth, vocabulary))
    hidden = jnp.asarray(generator.standard_normal((*lead, depth)) / depth**0.5, dtype)
    weights = jnp.asarray(2 * generator.standard_normal((depth, vocabulary)), dtype)
    return hidden, weights, jnp.asarray(generator.integers(0, vocabulary, lead), jnp.int32)


def _plain(
    hidden: Any, weights: Any, labels: Any, *, smoothing: float = 0.0, z: float = 0.0, cap: float | None = None
) -> jax.Array:
    """The loss of each token with every logit in memory."""
    logits = jnp.matmul(hidden, weights, preferred_element_type=jnp.float32)
    if cap is not None:
        logits = cap * jnp.tanh(logits / cap)
    size = logits.shape[-1]
    right = (1 - smoothing) * jax.nn.one_hot(labels, size) + smoothing / size
    return -(right * jax.nn.log_softmax(logits)).sum(-1) + z * jax.nn.logsumexp(logits, axis=-1) ** 2


FORMS = [
    ({}, {}),
    ({"z_loss": 1e-2}, {"z": 1e-2}),
    ({"label_smoothing": 0.2, "z_loss": 1e-3, "softcap": 3.0}, {"smoothing": 0.2, "z": 1e-3, "cap": 3.0}),
]


@pytest.mark.quick(cases=2)
@pytest.mark.parametrize(("given", "plain"), FORMS, ids=lambda form: "-".join(form) or "plain")
@pytest.mark.parametrize("gradient", ["recompute", "in_forward"])
def test_loss_and_gradients_against_logits_in_memory(given: Any, plain: Any, gradient: str) -> None:
    transpose = "z_loss" in given
    hidden, weights, labels = _draw((2, 9), 16, 53)
    labels = labels.at[0, 3].set(IGNORED).at[1, 0].set(IGNORED)

    def ours(hidden: Any, weights: Any) -> Any:
        table = weights.T if transpose else weights
        # 53 columns, or 18 tokens, in chunks that do not divide them.
        block = {"recompute": 20, "in_forward": 7}[gradient]
        return 2 * cross_entropy(
            hidden, table, labels, transpose_weights=transpose, block_size=block, gradient=gradient, **given
        )

    def right(hidden: Any, weights: Any) -> Any:
        return jnp.where(labels == IGNORED, 0, _plain(hidden, weights, labels, **plain)).sum() / 8

    got, wanted = (jax.jit(jax.value_and_grad(fn, argnums=(0, 1)))(hidden, weights) for fn in (ours, right))
    assert_close = functools.partial(np.testing.assert_allclose, atol=5e-6)
    assert_close(jax.jit(ours)(hidden, weights), wanted[0])  # without a gradient it is another program
    # Float32 throughout: numbers up to about 5, sums over 53 logits and 18 tokens.
    for mine, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        assert_close(mine, theirs)


@pytest.mark.spread(3)
@pytest.mark.quick
@pytest.mark.parametrize("over", [None, P("a"), P(None, "b")])
@pytest.mark.parametrize("gradient", GRADIENTS)
def test_how_much_of_the_result_is_z_loss(gradient: str, over: P | None) -> None:
    """With a gradient and without one; tokens or the vocabulary over a mesh; the gradient is that of the result."""
    hidden, weights, labels = _draw((8,), 16, 64)
    labels = labels.at[3].set(IGNORED)
    mesh = jax.make_mesh((2, 2), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
    if over is not None:
        spread = P() if over[0] is None else over
        hidden, labels = (jax.device_put(x, NamedSharding(mesh, spread)) for x in (hidden, labels))
        weights = jax.device_put(weights, NamedSharding(mesh, over if over[0] is None else P()))
    call = functools.partial(cross_entropy, z_loss=0.1, gradient=gradient)

    def pair(hidden: Any, weights: Any) -> Any:
        return call(hidden, weights, labels, return_z_loss=True)

    @jax.jit
    def right_share(hidden: Any, weights: Any, labels: Any) -> Any:
        of_each = _plain(hidden, weights, labels, z=0.1) - _plain(hidden, weights, labels)
        return jnp.where(labels == IGNORED, 0, of_each).sum() / 7

    wanted = right_share(hidden, weights, labels)
    (total, of_z), slopes = jax.jit(jax.value_and_grad(pair, argnums=(0, 1), has_aux=True))(hidden, weights)
    alone, right = jax.jit(jax.value_and_grad(lambda h, w: call(h, w, labels), argnums=(0, 1)))(hidden, weights)
    # Float32, numbers of about 5, and sums over 64 logits and 8 tokens.
    np.testing.assert_allclose(of_z, wanted, rtol=1e-5)
    np.testing.assert_allclose(jax.jit(pair)(hidden, weights)[1], wanted, rtol=1e-5)
    np.testing.assert_allclose(total, alone, rtol=1e-6)
    for mine, theirs in zip(slopes, right, strict=True):
        np.testing.assert_allclose(mine, theirs, atol=1e-6)


def test_z_loss_of_each_token_and_without_any() -> None:
    hidden, weights, labels = _draw((7,), 8, 30)
    each, of_z = cross_entropy(hidden, weights, labels, z_loss=0.1, reduction="none", return_z_loss=True)
    np.testing.assert_allclose(each - of_z, _plain(hidden, weights, labels), rtol=1e-5)
    assert float(cross_entropy(hidden, weights, labels, return_z_loss=True)[1]) == 0
    # Nothing is minimised through it.
    slope = jax.grad(lambda h: cross_entropy(h, weights, labels, z_loss=0.1, return_z_loss=True)[1])(hidden)
    assert not np.asarray(slope).any()


def test_reductions() -> None:
    hidden, weights, labels = _draw((7,), 8, 30)
    labels = labels.at[2].set(IGNORED)
    each = cross_entropy(hidden, weights, labels, reduction="none")
    assert each.shape == (7,)
    assert each.dtype == jnp.float32
    assert float(each[2]) == 0
    right = _plain(hidden, weights, labels).at[2].set(0)
    np.testing.assert_allclose(each, right, atol=2e-6)
    np.testing.assert_allclose(cross_entropy(hidden, weights, labels, reduction="sum"), right.sum(), rtol=1e-6)
    np.testing.assert_allclose(cross_entropy(hidden, weights, labels), right.sum() / 6, rtol=1e-6)
    other = cross_entropy(hidden, weights, labels.at[2].set(0), ignore_index=0, reduction="none")
    assert float(other[2]) == 0


def test_a_batch_with_nothing_to_learn_is_0_and_has_no_gradient() -> None:
    hidden, weights, labels = _draw((5,), 8, 30)
    fn = functools.partial(cross_entropy, labels=jnp.full_like(labels, IGNORED), label_smoothing=0.1, z_loss=0.1)
    for gradient in ("recompute", "in_forward"):
        of = functools.partial(fn, gradient=gradient)
        loss, grads = jax.jit(jax.value_and_grad(of, argnums=(0, 1)))(hidden, weights)
        assert float(loss) == 0
        assert not any(np.asarray(g).any() for g in grads)


@pytest.mark.parametrize("label", [30, -1])
def test_a_label_outside_of_the_vocabulary(label: int) -> None:
    """An error where the labels can be looked at; NaN, in the gradient too, where they cannot."""
    hidden, weights, labels = _draw((5,), 8, 30)
    labels = labels.at[3].set(label)
    with pytest.raises(ValueError, match=rf"0 to 29, or ignore_index=-100. Got {label} among i32\[5\]"):
        cross_entropy(hidden, weights, labels)
    each = jax.jit(functools.partial(cross_entropy, reduction="none"))(hidden, weights, labels)
    np.testing.assert_array_equal(np.isnan(each), [False, False, False, True, False])
    for gradient in ("recompute", "in_forward"):
        fn = functools.partial(cross_entropy, gradient=gradient)
        d_hidden = jax.jit(jax.grad(fn))(hidden, weights, labels)
        np.testing.assert_array_equal(np.isnan(d_hidden).all(-1), [False, False, False, True, False])


@pytest.mark.quick
@pytest.mark.parametrize("block", [7, 1000])
def test_any_block_gives_the_same(block: int) -> None:
    """Chunks that do not divide the vocabulary, and larger than it: the op's outputs and its gradients."""
    for op, name in ((CROSS_ENTROPY, "prime"), (CROSS_ENTROPY_GRAD, "prime")):
        case = op.case(name)
        arrays = case.arrays()
        wanted = expected(op, arrays, case.params)
        result = check_output(op(*arrays, implementation="xla", block=block, **case.params), wanted)
        assert result.ok, f"{op.name}: {result.why}"


def test_a_chunk_and_no_more_is_in_memory() -> None:
    hidden, weights, labels = _draw((512,), 32, 8192, "bfloat16")

    def temporary(block: int | None, implementation: str) -> int:
        fn = functools.partial(cross_entropy, block_size=block, implementation=implementation)
        stats = jax.jit(jax.grad(fn, argnums=(0, 1))).lower(hidden, weights, labels).compile().memory_analysis()
        return stats.temp_size_in_bytes

    chunk = 512 * 512 * 4  # bytes of a chunk's logits in float32
    accumulators = 4 * hidden.size + 2 * weights.size
    assert temporary(512, "xla") < 4 * chunk + accumulators
    assert temporary(512, "xla") < temporary(4096, "xla") < temporary(None, "reference")


def test_the_default_chunk() -> None:
    assert chunk_columns(16384, 128256, None) == 4096  # 256 MiB of float32 logits
    assert chunk_columns(1 << 20, 128256, None) == 1024  # never narrower
    assert chunk_columns(64, 50257, None) == 50257  # all at once
    assert chunk_columns(0, 10, None) == 10
    assert chunk_tokens(16384, 512, 128256, 4, None) == 1024  # 512 MiB of float32 logits
    assert chunk_tokens(16384, 2048, 128256, 4, None) == 2048  # as much as a gradient of the weights
    assert chunk_tokens(16384, 8192, 128256, 4, None) == 4096  # four times 512 MiB
    assert chunk_tokens(16384, 8192, 128256, 2, None) == 1024  # 384 MiB of bfloat16 hold 1536, no part of the tokens
    assert chunk_tokens(16000, 8192, 128256, 2, None) == 1536  # nothing from there down to the half of it divides them
    assert chunk_tokens(5, 8, 100, 4, None) == 5


@pytest.mark.quick
@pytest.mark.parametrize(("tokens", "columns"), [(P("data", "model"), None), (P("data"), "model"), (P(), "data")])
def test_tokens_and_vocabulary_are_split_over_a_mesh(tokens: P, columns: str | None) -> None:
    transpose = columns == "data"
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices("cpu")[:8])
    hidden, weights, labels = _draw((8, 4), 16, 64)
    labels = labels.at[1, 1].set(IGNORED)
    table = weights.T if transpose else weights
    fn = jax.value_and_grad(
        functools.partial(cross_entropy, transpose_weights=transpose, block_size=12, label_smoothing=0.1),
        argnums=(0, 1),
    )
    split = NamedSharding(mesh, P(columns, None) if transpose else P(None, columns))
    placed = (
        jax.device_put(hidden, NamedSharding(mesh, P(*tokens))),
        jax.device_put(table, split),
        jax.device_put(labels, NamedSharding(mesh, tokens)),
    )
    jitted = jax.jit(fn)
    got, wanted = jitted(*placed), jitted(hidden, table, labels)
    for mine, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(mine, theirs, atol=2e-6)
    assert got[1][1].sharding.is_equivalent_to(split, 2)
    assert "all-gather" not in jitted.lower(*placed).compile().as_text()


@pytest.mark.quick
@pytest.mark.parametrize(("tokens", "columns"), [(P("data", "model"), None), (P("data"), "model")])
def test_in_forward_on_a_mesh(tokens: P, columns: str | None) -> None:
    """By blocks of five of a device's twelve or 24 tokens, against all columns or its half of them."""
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices("cpu")[:8])
    hidden, weights, labels = _draw((8, 12), 16, 64)
    labels = labels.at[1, 1].set(IGNORED)
    more = {"label_smoothing": 0.1, "z_loss": 1e-2}
    fn = jax.jit(
        jax.value_and_grad(functools.partial(cross_entropy, gradient="in_forward", block_size=5, **more), (0, 1))
    )
    split = NamedSharding(mesh, P(None, columns))
    placed = (
        jax.device_put(hidden, NamedSharding(mesh, tokens)),
        jax.device_put(weights, split),
        jax.device_put(labels, NamedSharding(mesh, tokens)),
    )
    got, wanted = (
        fn(*placed),
        jax.jit(jax.value_and_grad(functools.partial(cross_entropy, **more), (0, 1)))(hidden, weights, labels),
    )
    for mine, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(mine, theirs, atol=2e-6)
    assert got[1][1].sharding.is_equivalent_to(split, 2)
    assert "all-gather" not in fn.lower(*placed).compile().as_text()


@pytest.mark.quick
@pytest.mark.parametrize("gradient", ["recompute", "in_forward"])
@pytest.mark.parametrize("entered", [False, True])
def test_a_mesh_with_explicit_axes(gradient: str, entered: bool) -> None:
    """The layout is part of the type there: gradients have their operands', a loss a token the labels'."""
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Explicit,) * 2, devices=jax.devices("cpu")[:8])
    hidden, weights, labels = _draw((16,), 8, 64)
    specs = (P("data"), P(None, "model"), P("data"))
    placed = tuple(
        jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip((hidden, weights, labels), specs, strict=True)
    )
    fn = jax.jit(jax.value_and_grad(functools.partial(cross_entropy, gradient=gradient), (0, 1)))
    wanted = fn(hidden, weights, labels)
    with jax.set_mesh(mesh) if entered else contextlib.nullcontext():
        got = fn(*placed)
        each = jax.jit(functools.partial(cross_entropy, reduction="none"))(*placed)
    for mine, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(mine, theirs, atol=2e-6)
    assert [jax.typeof(x).sharding.spec for x in (*got[1], each)] == [P("data", None), P(None, "model"), P("data")]
    np.testing.assert_allclose(each.mean(), wanted[0], atol=2e-6)


@pytest.mark.parametrize("device", ["cpu", "gpu", "tpu"])
def test_logits_are_never_rounded_unless_asked(device: str) -> None:
    arrays = [
        jax.ShapeDtypeStruct(x, d) for x, d in (((512, 64), "bfloat16"), ((64, 999), "bfloat16"), ((512,), "int32"))
    ]

    def narrow(**options: Any) -> bool:
        with target(device):
            seen = explain(jax.grad(lambda *x: cross_entropy(*x, **options)), *arrays).selections
        return any(s.call.params.get("narrow") for s in seen)

    assert not narrow()
    assert not narrow(gradient="in_forward")
    assert narrow(gradient="in_forward_narrow")


def test_explicit_axes_beside_manual_ones_are_refused() -> None:
    mesh = jax.make_mesh((2, 2), ("a", "b"), axis_types=(AxisType.Explicit,) * 2)
    hidden, weights, labels = _draw((4,), 8, 30)

    def loss(hidden: Any, weights: Any, labels: Any) -> Any:
        return jax.lax.pmean(cross_entropy(hidden, weights, labels), "a")

    placed = [jax.device_put(x, NamedSharding(mesh, P("a"))) for x in (hidden, labels)]
    specs: dict[str, Any] = {"in_specs": (P("a"), P(), P("a")), "out_specs": P(), "axis_names": {"a"}}
    with jax.set_mesh(mesh), pytest.raises(ValueError, match="takes no mesh axes that are explicit"):
        jax.jit(jax.shard_map(loss, **specs))(placed[0], weights, placed[1])


def test_in_forward_makes_a_gradient_only_where_one_is_asked_for() -> None:
    hidden, weights, labels = _draw((4,), 8, 30)
    fn = functools.partial(cross_entropy, gradient="in_forward")
    assert [s.call.op.name for s in explain(fn, hidden, weights, labels).selections] == ["cross_entropy"]
    seen = explain(jax.grad(fn), hidden, weights, labels).selections
    assert "cross_entropy_and_grad" in [s.call.op.name for s in seen]
    assert "cross_entropy_grad" not in [s.call.op.name for s in seen]


@pytest.mark.quick
@pytest.mark.parametrize(("gradient", "block"), [("recompute", 24), ("in_forward", 1)])
def test_inside_a_checked_shard_map(gradient: str, block: int) -> None:
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices("cpu")[:8])
    hidden, weights, labels = _draw((16,), 16, 64)

    def local(hidden: Any, weights: Any, labels: Any) -> Any:
        total = cross_entropy(hidden, weights, labels, reduction="sum", gradient=gradient, block_size=block)
        return jax.lax.psum(total, "data")

    mapped = jax.shard_map(local, mesh=mesh, in_specs=(P("data"), P(), P("data")), out_specs=P())
    got = jax.jit(jax.grad(mapped, argnums=(0, 1)))(hidden, weights, labels)
    wanted = jax.jit(jax.grad(lambda h, w: _plain(h, w, labels).sum(), argnums=(0, 1)))(hidden, weights)
    for mine, theirs in zip(got, wanted, strict=True):
        np.testing.assert_allclose(mine, theirs, atol=5e-6)


@pytest.mark.quick
def test_gradients_by_example() -> None:
    """vmap of grad gives each example its own gradient of weights that they share."""
    hidden, weights, labels = _draw((3, 5), 8, 40)
    fn = functools.partial(cross_entropy, block_size=16)
    grads = jax.jit(jax.grad(fn, argnums=(0, 1)))
    got = jax.jit(jax.vmap(grads, in_axes=(0, None, 0)))(hidden, weights, labels)
    assert got[1].shape == (3, 8, 40)
    for i in range(3):
        wanted = grads(hidden[i], weights, labels[i])
        for mine, theirs in zip(got, wanted, strict=True):
            np.testing.assert_allclose(mine[i], theirs, atol=1e-6)


@pytest.mark.parametrize(
    ("dtype", "vocabulary"), [("int8", 600), ("uint8", 256), ("uint8", 600), ("int16", 600), ("uint16", 600)]
)
def test_labels_of_any_whole_type(dtype: str, vocabulary: int) -> None:
    """Neither the vocabulary's size nor ignore_index (156 in uint8) wraps in the labels' type."""
    hidden, weights, _ = _draw((4,), 8, vocabulary)
    labels = jnp.array([1, 88, 120, 156 if dtype == "uint8" else 7])
    for block in (None, 100):
        got = cross_entropy(hidden, weights, labels.astype(dtype), reduction="none", block_size=block)
        np.testing.assert_array_equal(got, cross_entropy(hidden, weights, labels, reduction="none", block_size=block))
    if dtype == "int8":
        assert float(cross_entropy(hidden[:1], weights, jnp.array([IGNORED], dtype))) == 0


def test_unsigned_labels_beyond_int32() -> None:
    hidden, weights, _ = _draw((2,), 8, 30)
    labels = jnp.array([3, 2**32 + IGNORED], "uint32")  # as int32 it would be ignore_index itself
    with pytest.raises(ValueError, match="Got 4294967196 among uint32"):
        cross_entropy(hidden, weights, labels)
    kept = cross_entropy(hidden, weights, labels, ignore_index=2**32 + IGNORED)
    assert float(kept) == float(cross_entropy(hidden[:1], weights, labels[:1]))


@pytest.mark.parametrize("gradient", GRADIENTS)
def test_what_an_ignored_token_holds_is_ignored(gradient: str) -> None:
    hidden, weights, labels = _draw((4,), 8, 30)
    labels = labels.at[1].set(IGNORED)
    fn = jax.value_and_grad(functools.partial(cross_entropy, gradient=gradient), (0, 1))
    got, wanted = fn(hidden.at[1].set(jnp.nan), weights, labels), fn(hidden, weights, labels)
    for mine, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(mine, theirs, atol=1e-6)


@pytest.mark.parametrize("gradient", GRADIENTS)
def test_no_tokens(gradient: str) -> None:
    hidden, weights, labels = _draw((0,), 8, 30)
    loss, grads = jax.value_and_grad(functools.partial(cross_entropy, gradient=gradient), (0, 1))(
        hidden, weights, labels
    )
    assert (float(loss), grads[0].shape) == (0, (0, 8))
    assert not grads[1].any()


def test_large_logits_do_not_overflow() -> None:
    hidden, weights = jnp.full((1, 1), 1000.0), jnp.array([[1.0, -1.0, 0.5]])
    loss = cross_entropy(hidden, weights, jnp.array([2]), block_size=1)
    assert float(loss) == 500.0


def test_explain_shows_both_directions() -> None:
    hidden, weights, labels = _draw((4,), 8, 30)
    seen = explain(jax.grad(cross_entropy), hidden, weights, labels)
    names = [(s.call.op.name, s.implementation) for s in seen.selections]
    assert ("cross_entropy_grad", "xla") in names
    forced = explain(jax.grad(functools.partial(cross_entropy, implementation="reference")), hidden, weights, labels)
    assert {s.implementation for s in forced.selections} == {"reference"}


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda h, w, y: cross_entropy(h[0, 0], w, y[0]), "hidden is"),
        (lambda h, w, y: cross_entropy(h, w.T, y), r"weights are \[depth, vocabulary\], with hidden's depth 8"),
        (lambda h, w, y: cross_entropy(h, w, y, transpose_weights=True), "with transpose_weights=True"),
        (lambda h, w, y: cross_entropy(h, w[None], y), "weights are a matrix"),
        (lambda h, w, y: cross_entropy(h, w.astype("bfloat16"), y), "hidden and weights have one type"),
        (lambda h, w, y: cross_entropy(h.astype("int32"), w, y), "hidden of i32"),
        (lambda h, w, y: cross_entropy(h, w, y[:2]), r"labels are whole numbers \(4,\)"),
        (lambda h, w, y: cross_entropy(h, w, y.astype("float32")), "labels are whole numbers"),
        (lambda h, w, y: cross_entropy(h, w, None), "labels of type NoneType"),
        (lambda h, w, y: cross_entropy("x", w, y), "hidden of type str"),
        (lambda h, w, y: cross_entropy(h, w, y, reduction="median"), "Unknown reduction"),
        (lambda h, w, y: cross_entropy(h, w, y, gradient="never"), "Unknown gradient"),
        (lambda h, w, y: cross_entropy(h, w, y, gradient="in_forward", reduction="none"), "what becomes of each token"),
        (lambda h, w, y: cross_entropy(h, w, y, label_smoothing=1.0), "label_smoothing is a number from 0 to below 1"),
        (lambda h, w, y: cross_entropy(h, w, y, z_loss=-1.0), "z_loss is a finite number, 0 or more"),
        (lambda h, w, y: cross_entropy(h, w, y, softcap=0.0), "The soft cap is a finite number above 0"),
        (lambda h, w, y: cross_entropy(h, w, y, ignore_index=0.5), "ignore_index is a whole number"),
        (lambda h, w, y: cross_entropy(h, w, y, block_size=0), "block_size is a whole number of columns"),
        (lambda h, w, y: cross_entropy(h, w, y, block_size=8, implementation="reference"), "leave block_size out"),
        (lambda h, w, y: CROSS_ENTROPY_GRAD(h, w, y, y), "d_lse is a number a token"),
    ],
)
def test_errors_say_the_rule(call: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        call(*_draw((4,), 8, 30))
