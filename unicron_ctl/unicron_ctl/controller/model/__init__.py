"""The controller's knowledge: for good, folded from the log (`cluster_state`, `job_state`, `node_state`), and for now
(`view`, `job_view`)."""
