from jax.lax import *  # noqa: F403
