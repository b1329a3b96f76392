"""The node's own news, and the agent's helper processes."""
