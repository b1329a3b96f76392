"""Training state in memory that outlives the ranks: the agent owns it, ranks write it beside their training
(docs/design/memory.md)."""
