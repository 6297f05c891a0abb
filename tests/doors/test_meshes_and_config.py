"""The documented mesh, training mesh and TPUConfig calls, from the documented paths."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec


@pytest.mark.quick
def test_tpu_config() -> None:
    from capibara.config.tpu_config import TPUConfig, TPUError
    from capibara.jax.experimental import mesh_utils

    config = TPUConfig(
        num_chips=32,
        topology="4x8",
        memory_per_chip=32 * 1024**3,
        flops_per_chip=275e12,
        compute_dtype="bfloat16",
        param_dtype="float32",
    )
    mesh = Mesh(mesh_utils.create_device_mesh((4, 8)), axis_names=("data", "model"))
    x = jnp.ones((64, 16, 128), config.get_memory_config()["param_dtype"])
    placed = jax.device_put(x, NamedSharding(mesh, config.get_sharding_spec(x.shape)))
    assert placed.addressable_shards[0].data.shape == (16, 16, 16)
    assert config.use_mixed_precision
    assert config.get_memory_config()["use_mixed_precision"]
    assert config.detect_hotspots(np.full((4, 8), 0.9))[-1] == (3, 7)
    assert isinstance(config.optimize_sharding(), PartitionSpec)
    assert config.profile_tpu_usage()["memory_allocated"] >= x.nbytes
    assert issubclass(TPUError, RuntimeError)


@pytest.mark.quick
def test_training_mesh() -> None:
    from capibara.jax.tpu_v4.training import create_training_mesh

    mesh = create_training_mesh(
        total_chips=32, data_parallel_size=8, model_parallel_size=4, pipeline_parallel_size=1
    )  # fmt: skip
    assert (mesh.shape["data"], mesh.shape["model"], mesh.shape["pipeline"]) == (8, 4, 1)


def test_the_same_objects_from_every_door() -> None:
    import capibara.config
    import capibara.jax.tpu_v4
    from capibara import mesh
    from capibara.errors import TPUError
    from capibara.surface.tpu_config import TPUConfig

    assert capibara.config.TPUConfig is capibara.config.tpu_config.TPUConfig is TPUConfig
    assert capibara.config.tpu_config.TPUError is TPUError
    assert capibara.jax.tpu_v4.training.create_training_mesh is mesh.create_training_mesh


def test_what_is_not_documented_is_not_there() -> None:
    import capibara.config

    with pytest.raises(AttributeError, match="no attribute 'TPUKonfig'"):
        _ = capibara.config.TPUKonfig
    assert dir(capibara.config) == ["ModularModelConfig", "TPUConfig", "tpu_config"]


@pytest.mark.quick
@pytest.mark.parametrize("names", [["data", "model"], ["data", "model", "expert"]])
def test_meshes_as_the_kernel_documents_write_them(names: list[str]) -> None:
    from vishwamai.kernels.tpu import validate_sharding

    shape = (4, 8) if len(names) == 2 else (2, 4, 4)
    mesh = jax.sharding.Mesh(np.asarray(jax.devices()).reshape(shape), names)
    spec = PartitionSpec(*names)
    x = jax.device_put(np.ones((8, 16, 4)[: len(names)]), NamedSharding(mesh, spec))
    assert validate_sharding(x, mesh, spec) is x
    with pytest.raises(ValueError, match="not laid out as expected"):
        validate_sharding(x, mesh, PartitionSpec(None, *names[1:]))
