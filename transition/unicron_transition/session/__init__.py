"""The training loop that survives failures."""
