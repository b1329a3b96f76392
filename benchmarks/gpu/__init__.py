"""Unicron on one card: a table of checks (docs/gpu.md)."""
