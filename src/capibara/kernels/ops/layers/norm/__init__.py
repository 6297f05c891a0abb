"""Layer norm and RMS norm, with a fused residual add."""
