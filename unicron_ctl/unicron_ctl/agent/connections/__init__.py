"""An agent's place in the cluster, and its connections to the controller, the ranks and other agents."""
