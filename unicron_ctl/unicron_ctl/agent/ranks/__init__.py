"""The ranks of one node: their processes, warm starts, and how they end."""
