from jax.typing import *  # noqa: F403
