from jax.custom_derivatives import *  # noqa: F403
