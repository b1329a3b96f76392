"""Two sets of ranks, with Unicron and without it, which the case `cost` lets train by turns."""
