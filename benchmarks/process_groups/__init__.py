"""Which way frees ranks that wait for a dead one, and joins them anew: Unicron's, or torch's own."""
