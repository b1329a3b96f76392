"""What is to be planned: jobs, their throughput by size and layout, and the cluster."""
