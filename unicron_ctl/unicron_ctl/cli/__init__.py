"""One module for each `unicronctl` command; only the one that was asked for is imported."""
