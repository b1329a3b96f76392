"""What failed and how bad it is: texts and exits, the severity table, and escalation."""
