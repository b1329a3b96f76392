"""Samples by number, and micro-batches of them by iteration and index: what `unicron.data` offers."""
