"""The processes of the ranks: they are started, watched, forked from a zygote, and read."""
