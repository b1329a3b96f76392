"""`unicronctl`, and those of its commands that are needed to run a cluster."""
