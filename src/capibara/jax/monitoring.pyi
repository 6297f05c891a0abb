from jax.monitoring import *  # noqa: F403
