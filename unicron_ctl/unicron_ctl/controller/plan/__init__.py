"""How many nodes each job gets, and where its elements go."""
