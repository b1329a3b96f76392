"""Warm processes against cold ones (docs/design/warm-processes.md)."""
