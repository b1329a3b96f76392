"""Settings: `unicron.toml`, partitions, and the limits of the system."""
