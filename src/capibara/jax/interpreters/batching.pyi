from jax.interpreters.batching import *  # noqa: F403
