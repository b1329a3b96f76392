"""`unicronctl web`: a read-only page. A process of its own asks the controller once for all who look at it."""
