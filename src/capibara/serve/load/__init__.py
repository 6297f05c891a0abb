"""Load for a server: arrivals by chance, lengths from a fixed trace, and what clients saw."""
