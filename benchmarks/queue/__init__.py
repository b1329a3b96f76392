"""What listing a long queue costs the controller's interpreter and slurmctld."""
