from jax.experimental.scheduling_groups import *  # noqa: F403
