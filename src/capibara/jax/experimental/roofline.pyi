from jax.experimental.roofline import *  # noqa: F403
