"""A private Slurm cluster on one machine, and the demo on it."""
