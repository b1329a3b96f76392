"""The names by which users start programs that lie in `unicron_transition`."""
