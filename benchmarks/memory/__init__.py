"""What it costs to keep the training state in memory that outlives the ranks."""
