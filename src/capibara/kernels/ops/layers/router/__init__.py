"""Which experts a token goes to, and with what weights: the router of a mixture of experts."""
