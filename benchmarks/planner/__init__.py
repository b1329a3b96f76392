"""What the planner promises, measured: `python -m benchmarks.planner`."""
