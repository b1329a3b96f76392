"""unicrond, unicron-agent and unicronctl: what they share, what each is, and the rooms behind the fence."""
