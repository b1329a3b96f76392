"""Iterations that take too long: statistics of their times, stragglers, and who keeps the others waiting."""
