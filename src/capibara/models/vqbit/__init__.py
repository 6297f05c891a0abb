"""A vector-quantizing layer whose codebook learns."""
