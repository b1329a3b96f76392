"""One job's decider: its state machine, what each transition records, and what its agents are told."""
