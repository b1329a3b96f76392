"""Unmodified scripts that lose a node: the time to the next step, and that never two worlds write."""
