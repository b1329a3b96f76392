"""The lab's commands: cluster, demo, inject and punish."""
