"""Who forms a job of a distributed optimizer from the shards that ranks hold, and who begins the iteration anew."""

from __future__ import annotations

from unicron_ctl.controller.replication.forming import formable
from unicron_ctl.shared.protocol.structs import RankStatus, Shards


def stopped(iteration: int, version: int) -> RankStatus:
    """One of two replicas, with both shards of its place."""
    return RankStatus(state="stopped", iteration=iteration, done=[iteration], shards=[Shards(1, version, 2, [0, 1])])


def test_ranks_that_form_a_job_with_new_processes_begin_the_iteration_with_them():
    """In a replica of both only those who stopped would compare what is in their gradients."""
    reports = {slot: stopped(7, 7) for slot in range(4)}
    assert formable(reports, 2).joiners == []
    reports[2].state = "waiting"
    found = formable(reports, 2)
    assert (found.members, found.joiners, found.state, found.iteration) == ([0, 1, 2, 3], [0, 1, 3], (1, 7), 7)


def test_ranks_that_go_back_to_an_older_state_begin_its_iteration_together():
    reports = {slot: stopped(7, 6) for slot in range(4)}
    reports[3].iteration = 6  # it had not got on yet
    found = formable(reports, 2)
    assert (found.joiners, found.state) == ([0, 1, 2, 3], (1, 6))
