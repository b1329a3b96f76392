"""Failures and their severity: texts and exits, the severity table, and escalation."""
