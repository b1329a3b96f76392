"""Hundreds of iterations with random losses, in each layout."""
