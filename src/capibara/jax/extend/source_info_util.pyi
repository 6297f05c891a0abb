from jax.extend.source_info_util import *  # noqa: F403
