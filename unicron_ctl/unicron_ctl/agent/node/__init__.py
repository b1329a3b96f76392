"""What the node itself knows, and its helper processes."""
