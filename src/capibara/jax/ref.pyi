from jax.ref import *  # noqa: F403
