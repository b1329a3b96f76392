"""Fault injection: what `unicronctl inject` can break."""
