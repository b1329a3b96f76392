"""The agent's loop, and its lines to the controller, the ranks and other agents."""
