"""One iteration of a rank: its process, micro-batches, random numbers, and the small collectives."""
