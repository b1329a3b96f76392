"""Training scripts of the cases' ranks."""
