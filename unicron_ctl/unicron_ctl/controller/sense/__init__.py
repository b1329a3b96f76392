"""Sensors: from what agents, Slurm and the clock show to findings. They decide nothing and send nothing."""
