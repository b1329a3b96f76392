"""Loggers of committed iterations, written by one rank at a time: what `unicron.loggers` offers."""
