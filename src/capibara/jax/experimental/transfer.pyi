from jax.experimental.transfer import *  # noqa: F403
