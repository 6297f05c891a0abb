from jax.ad_checkpoint import *  # noqa: F403
