"""Plans for what may happen next."""
