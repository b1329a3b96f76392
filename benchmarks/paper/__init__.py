"""The evaluation of Unicron's paper, section 6, in the simulator: `python -m benchmarks.paper`."""
