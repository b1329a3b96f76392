"""The best plan for one scenario, and why."""
