"""Deciders about nodes: which may be taken out of service, which may come back."""
