"""The interval between checkpoints that a job finds by itself: `python -m benchmarks.checkpoint_interval`."""
