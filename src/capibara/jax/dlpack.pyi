from jax.dlpack import *  # noqa: F403
