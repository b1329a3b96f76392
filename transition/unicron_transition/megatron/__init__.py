"""Megatron's models: their gradients, buffers and losses in a session."""
