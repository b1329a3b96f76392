"""From findings to failures: the only place that knows the severity table and its escalation."""
