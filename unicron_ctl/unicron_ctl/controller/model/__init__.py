"""What the controller knows: for good, folded from the log (`cluster`, `job`, `node`), and for now (`live`)."""
