from jax.example_libraries.stax import *  # noqa: F403
