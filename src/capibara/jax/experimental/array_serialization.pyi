from jax.experimental.array_serialization import *  # noqa: F403
