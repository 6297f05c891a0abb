"""Matrix multiplication with a fused epilogue."""
