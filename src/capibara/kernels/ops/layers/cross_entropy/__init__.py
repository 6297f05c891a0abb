"""Softmax cross-entropy over a large vocabulary, without its logits in memory."""
