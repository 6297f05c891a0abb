"""State space duality (Mamba-2) and gated linear attention: recurrences whose work is matrix products."""
