from jax.dtypes import *  # noqa: F403
