"""Singular values and vectors: all of them, or the leading ones by a random sketch."""
