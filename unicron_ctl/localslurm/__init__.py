"""A private Slurm cluster of many virtual nodes on one machine, for the demo, the tests and experiments."""

from unicron_ctl.localslurm.local import LocalCluster

__all__ = ["LocalCluster"]
