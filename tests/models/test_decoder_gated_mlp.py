"""A training step on Hopper has its gated mlp by kernels: where, and where not."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from capibara.kernels import explain, target
from capibara.mesh import MeshConfig
from capibara.models import ModularModelConfig, decoder
from capibara.models.blocks.mlp import Mlp
from capibara.models.blocks.spec import LORA_DOWN, LORA_UP
from capibara.parallel.remat import checkpoint_scans
from capibara.precision import Fp8Settings
from capibara.program.markers import recording_axes

MODEL = ModularModelConfig(
    hidden=256, layers=2, vocab=512, blocks={"attention": {"heads": 4, "kv_heads": 2}, "mlp": {"ffn": 512}}
)


def _gated(
    model: ModularModelConfig = MODEL, tokens: int = 4096, dtype: Any = jnp.float32, remat: str = "none", **options: Any
) -> list[tuple[str, str]]:
    """(op, implementation) of what a step that is traced for an H200 has of gated_mlp."""
    batch = decoder.batch_shapes(2, tokens // 2)

    def step(params: Any, batch: Any) -> Any:
        history = decoder.fp8_history_shapes(model, options["fp8"]) if "fp8" in options else None
        zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), history)
        loss = checkpoint_scans(lambda p: decoder.loss(model, p, batch, fp8_history=zeros, **options)[0], remat)
        return jax.grad(loss)(params)

    with target("gpu", "NVIDIA H200"):
        found = explain(step, decoder.param_shapes(model, dtype), batch).selections
    return [(s.call.op.name, s.implementation) for s in found if s.call.op.name.startswith("gated_")]


@pytest.mark.quick
def test_forward_and_backward_are_kernels() -> None:
    assert set(_gated()) == {("gated_products", "hopper"), ("gated_products_grad", "hopper")}


def test_few_tokens_fp8_and_weights_that_are_not_cast_have_products_of_their_own() -> None:
    assert not _gated(tokens=2048)
    assert not _gated(dtype=jnp.bfloat16)
    assert not _gated(fp8=Fp8Settings())


def test_so_has_a_step_that_keeps_its_products() -> None:
    """Of a kernel it would keep nothing, and multiply again."""
    assert not _gated(remat="dots")
    assert _gated(remat="full")
    assert _gated()  # afterwards


def test_so_has_what_is_no_plain_gated_mlp() -> None:
    for changes in ({"bias": True}, {"activation": "gelu"}):
        blocks = {"attention": {"heads": 4}, "mlp": {"ffn": 512, **changes}}
        assert not _gated(ModularModelConfig(hidden=256, layers=1, vocab=512, blocks=blocks))
    rows, weight = jax.ShapeDtypeStruct((8192, 512), jnp.bfloat16), jax.ShapeDtypeStruct((512, 512), jnp.float32)
    changed = dict.fromkeys(("gate", "up", "down", "down" + LORA_DOWN, "down" + LORA_UP), weight)
    with target("gpu", "NVIDIA H200"):
        assert Mlp(512)._by_kernels(changed, rows) is None


def test_fp8_has_kernels_of_its_own_where_its_scales_are_known_beforehand() -> None:
    wanted = {("gated_fp8", "hopper"), ("gated_fp8_grad", "hopper")}
    model = ModularModelConfig(
        hidden=256, layers=1, vocab=512, blocks={"attention": {"heads": 4}, "mlp": {"ffn": 1024}}
    )
    assert set(_gated(model, fp8=Fp8Settings(scaling="delayed"))) == wanted
    assert not _gated(model, fp8=Fp8Settings())
    assert not _gated(model, fp8=Fp8Settings(scaling="delayed"), remat="dots")


def test_a_mesh_and_a_planner_see_the_products() -> None:
    """Their columns may be cut over devices, which names on what lies between them say."""
    mesh = MeshConfig((2, 4), ("data", "model")).build(jax.devices()[:8])
    with jax.set_mesh(mesh):
        assert not _gated()
    with recording_axes():
        assert not _gated()
    with jax.set_mesh(MeshConfig((1,), ("data",)).build(jax.devices()[:1])):
        assert _gated()
