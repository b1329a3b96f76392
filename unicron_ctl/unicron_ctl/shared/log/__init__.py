"""The event log: what was decided, in order. The controller's state is a fold over it (`model`)."""
