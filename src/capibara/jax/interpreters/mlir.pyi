from jax.interpreters.mlir import *  # noqa: F403
