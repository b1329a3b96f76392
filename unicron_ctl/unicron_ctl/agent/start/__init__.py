"""How an agent starts: who it is, and in which mode its command runs."""
