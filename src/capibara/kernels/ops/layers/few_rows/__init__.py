"""Products of a few rows with a weight that is read once: what decoding is made of."""
