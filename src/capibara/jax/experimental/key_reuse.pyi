from jax.experimental.key_reuse import *  # noqa: F403
