"""The plan: nodes for each job, and where its elements go."""
