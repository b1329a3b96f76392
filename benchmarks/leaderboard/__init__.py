"""Unicron beside its peers: the same training, the same failures, one machine, one run (docs/leaderboard.md)."""
