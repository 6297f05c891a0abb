from jax.experimental.rnn import *  # noqa: F403
