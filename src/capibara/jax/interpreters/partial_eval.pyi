from jax.interpreters.partial_eval import *  # noqa: F403
