"""The simulator beside published figures: `python -m benchmarks.crosschecks`."""
