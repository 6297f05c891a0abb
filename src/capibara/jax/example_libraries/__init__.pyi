from jax.example_libraries import *  # noqa: F403
