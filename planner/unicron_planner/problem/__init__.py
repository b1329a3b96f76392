"""The planner's problem: jobs, their throughput by size and layout, and the cluster."""
