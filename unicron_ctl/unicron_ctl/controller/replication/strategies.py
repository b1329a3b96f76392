"""Chooses a job's replication strategy."""

from __future__ import annotations

from unicron_ctl.controller.model import healing_modes
from unicron_ctl.controller.model.job_view import JobView
from unicron_ctl.controller.replication.script_states import ScriptStates
from unicron_ctl.controller.replication.shards import Shards
from unicron_ctl.controller.replication.strategy import ReplicationStrategy
from unicron_ctl.controller.replication.whole_states import WholeStates

SCRIPT_STATES, SHARDS, WHOLE_STATES = ScriptStates(), Shards(), WholeStates()


def strategy_of(job: JobView) -> ReplicationStrategy:
    """Return the strategy for the kind of state that the job's ranks keep."""
    if job.state.mode is healing_modes.RESTART:
        return SCRIPT_STATES
    return SHARDS if job.sharded else WHOLE_STATES
