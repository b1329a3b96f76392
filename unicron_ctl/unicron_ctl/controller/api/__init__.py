"""The answers to `unicronctl`."""
