"""A gated activation in fp8, as it is and transposed, and its gradients so."""
