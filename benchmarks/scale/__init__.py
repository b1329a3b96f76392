"""How the controller's work grows with agents and ranks: a real unicrond and simulated agents over loopback."""
