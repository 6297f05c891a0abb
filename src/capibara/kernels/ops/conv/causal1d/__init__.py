"""Short causal convolutions of sequences, one filter a channel."""
