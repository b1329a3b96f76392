"""How large the event log gets in a year of a large cluster, and how long a start takes on it."""
