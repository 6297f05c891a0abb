"""Type stubs that let type checkers and editors see jax's names under `capibara.jax`.

At run time the modules come from `alias`; tools that read files need files. Write them anew with
`python -m capibara.dropin.stubs` after changing the list.
"""

from __future__ import annotations

from pathlib import Path

__all__ = ["COVERED", "stubs"]

_TREE = {
    "": (
        "ad_checkpoint api_util core custom_batching custom_derivatives debug distributed dlpack "
        "dtypes errors example_libraries experimental export extend ffi flatten_util image "
        "interpreters lax lib monitoring nn numpy ops profiler random ref scipy sharding stages "
        "test_util tree tree_util typing version"
    ),
    "example_libraries": "optimizers stax",
    "experimental": (
        "array_serialization buffer_callback checkify colocated_python compilation_cache compute_on "
        "custom_partitioning hijax jet key_reuse layout mesh_utils multihost_utils ode pallas pjit "
        "profiler rnn roofline scheduling_groups serialize_executable shard_map sparse topologies "
        "transfer xla_metadata"
    ),
    "experimental.compilation_cache": "compilation_cache",
    "experimental.pallas": "fuser mosaic_gpu tpu tpu_sc triton",
    "extend": "backend core ifrt_programs linear_util random sharding source_info_util",
    "extend.core": "primitives",
    "interpreters": "ad batching mlir partial_eval pxla xla",
    "lax": "linalg",
    "nn": "initializers",
    "numpy": "fft linalg",
    "scipy": ("cluster fft integrate interpolate linalg ndimage optimize signal sparse spatial special stats"),
    "scipy.cluster": "vq",
    "scipy.sparse": "linalg",
    "scipy.spatial": "transform",
    "scipy.stats": (
        "bernoulli beta betabinom binom cauchy chi2 dirichlet expon gamma gennorm geom gumbel_l "
        "gumbel_r laplace logistic multinomial multivariate_normal nbinom norm pareto poisson t "
        "truncnorm uniform vonmises wrapcauchy"
    ),
}

COVERED = tuple(f"{parent}.{name}".lstrip(".") for parent, names in _TREE.items() for name in names.split())
"""Paths below jax that have a stub."""


def stubs() -> dict[Path, str]:
    """File, relative to the folder of `capibara.jax` -> its text."""
    parents = {path for path in _TREE if path}
    return {
        Path(*path.split(".")) / "__init__.pyi"
        if path in parents
        else Path(*path.split(".")).with_suffix(".pyi"): f"from jax.{path} import *  # noqa: F403\n"
        for path in COVERED
    }


if __name__ == "__main__":
    for file, text in stubs().items():
        target = Path(__file__).parents[1] / "jax" / file
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)
