from jax.ffi import *  # noqa: F403
