"""Checkpoints of every format that is read and written, by one index (docs/design/checkpoints.md). None needs torch to
be read."""
