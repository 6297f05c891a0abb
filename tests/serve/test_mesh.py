"""Over several devices: weights and cache are divided, and the tokens stay."""

from __future__ import annotations

from pathlib import Path

import jax
import pytest
from tests.serve.engines import answers, engine_of, model_of, prompts_of, wanted

from capibara.mesh import MeshConfig
from capibara.models import ModularCapibaraModel

pytestmark = pytest.mark.skipif(len(jax.devices()) < 4, reason="needs 4 devices")


@pytest.mark.spread(1)
@pytest.mark.parametrize(
    ("name", "axes"),
    [("attention", {"model": 2}), ("attention", {"model": 4}), ("hybrid", {"model": 2})],
    ids=["2", "4, more than key heads", "a hybrid"],
)
def test_tokens_over_a_mesh_are_the_plain_models(name: str, axes: dict[str, int], programs: Path) -> None:
    prompts = prompts_of(5, 16, 9)
    expected = [wanted(name, prompt) for prompt in prompts]
    model = ModularCapibaraModel(model_of(name).config, params=model_of(name).params, precision="float32")
    mesh = MeshConfig((axes["model"],), ("model",)).build(jax.devices()[: axes["model"]])
    engine = engine_of(model, programs, mesh=mesh)
    assert answers(engine, prompts) == expected
    query = next(layer["attention"] for layer in engine.runner.params["layers"] if "attention" in layer)["query"]
    assert query.addressable_shards[0].data.size == query.size // axes["model"]
    if axes["model"] == 2:
        pool = next(layer["attention"] for layer in engine.runner.state.cache if "attention" in layer)["key"]
        assert pool.addressable_shards[0].data.size == pool.size // 2
        whole = engine_of(model_of(name), programs)
        assert engine.cache_size.page_bytes == whole.cache_size.page_bytes // 2
    # A second engine finds its programs on disk.
    again = engine_of(model, programs, mesh=mesh)
    assert answers(again, prompts) == expected
    assert again.stats().compilations == 0
