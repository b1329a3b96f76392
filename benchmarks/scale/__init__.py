"""Simulated agents, and a unicrond for them, for the cases `scale` and `trace`."""
