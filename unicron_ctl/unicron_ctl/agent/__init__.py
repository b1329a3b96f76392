"""unicron-agent: parent of a node's ranks; see `unicron_ctl.agent.loop.agent`."""
