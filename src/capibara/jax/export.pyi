from jax.export import *  # noqa: F403
