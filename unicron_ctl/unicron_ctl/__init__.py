"""The three programs: unicronctl, unicrond and unicron-agent, and the private local Slurm cluster."""
