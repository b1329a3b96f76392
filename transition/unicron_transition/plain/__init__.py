"""Plain torch modules in a session."""
