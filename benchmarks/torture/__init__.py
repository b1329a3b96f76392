"""Torture: two jobs on one Slurm cluster, a failure every few seconds for hours, and proofs that none shows."""
