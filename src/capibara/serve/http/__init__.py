"""The HTTP server: OpenAI's interface, in a process without jax, before an engine in another."""
