"""What it costs to keep the training state in memory, and what it brings."""
