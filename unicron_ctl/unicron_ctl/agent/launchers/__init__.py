"""Launchers of ranks in a command, in whose place the agent starts them."""
