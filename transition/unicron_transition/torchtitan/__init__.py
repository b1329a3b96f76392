"""torchtitan's own trainer under a session: `python -m unicron.torchtitan` in place of `python -m torchtitan.train`.

Configuration, model, optimizer, schedule and data are torchtitan's. The session has the loop, the state and the
checkpoints.
"""
