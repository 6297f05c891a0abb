from jax.experimental.multihost_utils import *  # noqa: F403
