"""Storms: what a site's network, power and daemons do to training jobs, and what becomes of the jobs."""
