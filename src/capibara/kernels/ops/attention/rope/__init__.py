"""Rotary position embedding: pairs of a head's numbers turned by an angle that grows with the position."""
