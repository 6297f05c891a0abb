from jax.custom_batching import *  # noqa: F403
