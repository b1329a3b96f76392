"""Snapshots in the memory of the node, copies in other nodes, and checkpoint files made of them."""
