"""Failure detection: signals and severities, process supervision, iteration statistics, health checks."""
