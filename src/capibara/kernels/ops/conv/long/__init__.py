"""Causal convolutions with filters as long as the sequence."""
