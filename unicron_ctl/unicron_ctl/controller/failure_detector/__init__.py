"""Does that node live? Leases, indirect probes, quorum and network partitions."""
