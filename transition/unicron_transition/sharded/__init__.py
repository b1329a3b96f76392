"""The state of a distributed optimizer: its shards in memory, in other ranks, and in files."""
