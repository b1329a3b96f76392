"""The generations of a job: process groups, members, and what ends a stuck collective."""
