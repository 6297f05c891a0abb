from jax.test_util import *  # noqa: F403
