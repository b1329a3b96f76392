"""`unicronctl demo`: two GPT jobs on a private Slurm, broken in four ways and healed; see `demo.story`."""
