"""Who an agent is, and its connections to the controller, the ranks and other agents."""
