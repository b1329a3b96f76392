"""What a recovery in the ranks costs, measured, and a soak that tries to break it."""
