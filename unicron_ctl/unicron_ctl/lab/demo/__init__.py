"""`unicronctl demo`: two GPT jobs on a private Slurm, broken in five ways and healed; see `demo.story`."""
