"""How silent faults are found: many of them, runs without any, and what the checks cost."""
