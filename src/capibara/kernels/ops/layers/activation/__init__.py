"""Activations, plain and gated, with dropout fused in."""
