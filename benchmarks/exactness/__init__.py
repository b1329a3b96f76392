"""How far a healed run is from an undisturbed one."""
