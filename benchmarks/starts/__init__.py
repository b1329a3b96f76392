"""What Unicron adds to the start of a step, and how soon a killed task of a node steps again."""
