from jax.experimental.buffer_callback import *  # noqa: F403
