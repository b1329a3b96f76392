"""What preemptions with notice cost a job, on a real Slurm."""
