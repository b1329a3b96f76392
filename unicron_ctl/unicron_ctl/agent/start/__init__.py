"""The start of an agent: its place, and the mode in which its command runs."""
