from jax.experimental.compute_on import *  # noqa: F403
