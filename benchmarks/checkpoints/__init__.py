"""Checkpoints of other formats, in and out."""
