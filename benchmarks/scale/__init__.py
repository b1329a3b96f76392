"""Growth of the controller's work with agents and ranks: a real unicrond and simulated agents over loopback."""
