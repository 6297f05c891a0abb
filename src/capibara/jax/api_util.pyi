from jax.api_util import *  # noqa: F403
