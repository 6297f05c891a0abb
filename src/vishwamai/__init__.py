"""The documented vishwamai names; each comes from a room of capibara."""
