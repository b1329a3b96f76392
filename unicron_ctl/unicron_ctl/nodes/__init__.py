"""Programs that run on compute nodes, or for them: admission checks and the paired test."""
