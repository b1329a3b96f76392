"""Which copies of the training state are made in other nodes, and who is given one."""
