"""The part that runs in the ranks: the session, the generations of the job, and the training state in memory and on
disk."""
