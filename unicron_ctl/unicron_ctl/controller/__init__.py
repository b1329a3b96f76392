"""unicrond, the controller: an event log, pure deciders over it, and a loop that carries their decisions out."""
