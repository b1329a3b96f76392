"""The training state: in memory that outlives the ranks, in other ranks, and on disk."""
