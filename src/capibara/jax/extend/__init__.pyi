from jax.extend import *  # noqa: F403
