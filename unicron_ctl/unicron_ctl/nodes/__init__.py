"""The admission checks of a node, as a program that Slurm starts there."""
