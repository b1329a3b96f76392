"""Code that controller, agent and commands share: messages, settings, Slurm, consensus, the system."""
