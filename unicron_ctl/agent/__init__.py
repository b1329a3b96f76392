"""unicron-agent: parent of a node's ranks; see `unicron.ctl.agent.loop.agent`."""
