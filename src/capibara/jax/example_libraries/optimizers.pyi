from jax.example_libraries.optimizers import *  # noqa: F403
