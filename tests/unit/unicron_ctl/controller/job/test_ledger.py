"""Every micro-batch counts exactly once: the ledger of what ranks report."""

from __future__ import annotations

import pytest

from tests.support.scenarios import recorded, trained
from tests.support.world import World
from unicron_ctl.controller.model.job_ledger import MOST_TOTAL, OPEN_ITERATIONS, JobLedger, OpenIteration
from unicron_ctl.shared.log import records
from unicron_ctl.shared.protocol.structs import RankStep, StepTable, step_table
from unicron_ctl.shared.protocol.wire import Status, Steps


def step(slot: int, iteration: int, indices: list[int], computed: list[int] | None = None) -> StepTable:
    rank = RankStep(slot, indices, 1.0, 2.0, computed)
    return step_table(generation=1, iteration=iteration, total=4, at=0.0, ranks=[rank])


def no(iteration: int) -> bool:
    """Nothing disturbs an iteration."""
    return False


@pytest.mark.parametrize(
    ("first", "second", "disturbed", "computed", "unreported"),
    [
        pytest.param([[0, 2]], [[1, 3]], False, 4, [], id="all is there"),
        pytest.param([[0, 2]], [[1, 3], [3, 0]], True, 4, [], id="computed twice without being dropped"),
        pytest.param([[0, 2]], [[1]], True, 3, [3], id="a report is missing"),
        pytest.param([[0, 2], [1, 3, 0, 2]], [[1, 3]], True, 6, [], id="dropped without a copy as a generation broke"),
        pytest.param([[0, 2], [1, 3, 0, 2]], [[1, 3]], False, 6, [], id="dropped, and no generation broke"),
        pytest.param([[0, 2]], [[1, 2]], False, 4, [], id="one is missing, and one doubled"),
        pytest.param([[0, 1, 4]], [[-1, 2, 4]], False, 6, [], id="strangers"),
    ],
)
def test_the_account_of_an_iteration(first, second, disturbed, computed, unreported, snapshot):
    """Each rank has micro-batches in its gradient and, if others, those that it computed."""
    ledger = JobLedger()
    assert ledger.add(step(0, 0, *first), {0, 1}, lambda _: disturbed) == []
    (account,) = ledger.add(step(1, 0, *second), {0, 1}, lambda _: disturbed)
    assert (account.computed, account.ranks, account.unreported) == (computed, 2, unreported)
    assert account.problems == snapshot
    assert ledger.add(step(1, 0, *second), {0, 1}, lambda _: disturbed) == [], "a repeated report counts once"


def test_what_cannot_be_is_not_counted():
    """An iteration that is closed, or one with no micro-batches or too many of them."""
    ledger = JobLedger()
    assert ledger.add(step(0, 3, [0, 1, 2, 3]), {0}, no) and ledger.closed == 3
    assert ledger.add(step(0, 3, [0, 1, 2, 3]), {0}, no) == [] and not ledger.open
    for total in (0, -1, MOST_TOTAL + 1):
        report = step_table(generation=1, iteration=4, total=total, at=0.0, ranks=[RankStep(0, [0], 1.0, 2.0)])
        assert ledger.add(report, {0}, no) == [] and not ledger.open
    for iteration, total in ((4, 1), (5, MOST_TOTAL)):
        report = step_table(generation=1, iteration=iteration, total=total, at=0.0, ranks=[RankStep(0, [0], 1.0, 2.0)])
        assert bool(ledger.add(report, {0}, no)) == (total == 1)
    assert list(ledger.open) == [5]


def test_an_account_has_the_figures_of_its_reports():
    ledger = JobLedger()
    ranks = [RankStep(0, [0], 1.0, 0.5), RankStep(1, [1, 2], 2.0, 0.7), RankStep(2, [3], 9.0, 0.9, [3, 2])]
    (account,) = ledger.add(step_table(3, 6, 4, 0.0, ranks), {0, 1, 2}, lambda i: True)
    assert (account.iteration, account.generation, account.loss, account.seconds) == (6, 3, 0.5, 2.0)
    assert (account.ranks, account.total, account.computed) == (3, 4, 5)
    assert account.problems == [] and account.unreported == [], "the third rank dropped what it had"


def test_as_many_iterations_as_may_be_open_are_open():
    ledger = JobLedger()
    for iteration in range(OPEN_ITERATIONS):
        assert ledger.add(step(0, iteration, [0]), {0, 1}, no) == []
    (account,) = ledger.add(step(0, OPEN_ITERATIONS, [0]), {0, 1}, no)
    assert account.iteration == 0 and account.unreported == [1, 2, 3] and account.problems == []


def test_without_a_disturbance_all_members_reports_prove_a_gap_only_when_they_go_on(snapshot):
    ledger = JobLedger()
    assert ledger.add(step(0, 0, [0, 1]), {0}, no) == []
    (account,) = ledger.add(step(0, 1, [0, 1]), {0}, no)
    assert account.iteration == 0 and account.problems == snapshot
    assert list(ledger.open) == [1]


def test_who_has_to_report_is_found_anew_when_the_members_change():
    entry = OpenIteration(4)
    entry.add(step(0, 0, [0]))
    entry.add(step(1, 0, [1]))
    two, others = {0, 1}, {0, 2}
    assert entry.all_in(two) and entry.all_in(two) and not entry.all_in(others)
    entry.add(step(2, 0, [2]))
    assert entry.all_in(others)


def test_gaps_doubles_and_strangers_are_violations(snapshot):
    ledger = JobLedger()
    reports = [
        step(0, 0, [0, 1, 9], [0, 0, 1]),
        step(1, 0, [1]),
        step(0, 1, [0]),
        step(1, 1, [1]),
        step(0, 2, [0, 2]),
        step(1, 2, [1, 3]),
    ]
    accounts = [account for report in reports for account in ledger.add(report, {0, 1}, no)]
    assert [account.iteration for account in accounts] == [0, 1, 2] and accounts[2].problems == []
    assert [account.problems for account in accounts[:2]] == snapshot


def test_the_ledger_is_checked():
    world, agents = trained(2, seconds=0.3)
    world.iterate("1", 0)
    assert world.job().iteration == 0 and world.job().ledger_violations == 0
    agents[0].step(0, 1, [0, 2, 4, 6])
    agents[1].step(1, 1, [1, 3, 5, 6])
    world.iterate("1", 2)
    assert world.job().ledger_violations == 1
    agents[0].step(0, 3, [0, 2, 4, 6], computed=[0, 0, 2, 4, 6])
    agents[1].step(1, 3, [1, 3, 5, 7])
    assert world.job().ledger_violations == 2


def test_a_report_that_was_lost_on_its_way_is_no_violation():
    world, agents = trained(2, seconds=0.3)
    world.iterate("1", 0)
    agents[0].step(0, 1, [0, 2, 4, 6])
    agents[1].next_step()  # its report of iteration 1 never comes
    world.iterate("1", 2)
    assert world.job().ledger_violations == 0 and world.job().iteration == 2
    steps = [event.record for event in world.log if isinstance(event.record, records.Step)]
    assert [step.unreported for step in steps] == [[], [1, 3, 5, 7], []]


def test_steps_that_come_with_a_status_count_before_what_it_says():
    """In large jobs: of the rank that has ended nothing is missing."""
    world, agents = trained(2, seconds=0.3)
    world.iterate("1", 0)
    agents[0].report(1, RankStep(0, [0, 2, 4, 6], 0.5, 1.0), hold=True)
    agents[1].step(1, 1, [1, 3, 5, 7])
    assert world.job().iteration == 0
    agents[0].die(0)
    assert not agents[0].held_steps and world.job().iteration == 1
    steps = [event.record for event in world.log if isinstance(event.record, records.Step)]
    assert [step.unreported for step in steps] == [[], []] and world.job().ledger_violations == 0


def test_a_status_proves_nothing_for_other_agents_ranks_or_other_jobs():
    world, agents = trained(2, seconds=0.3)
    world.iterate("1", 0)
    agents[0].step(0, 1, [0, 2, 4, 6])
    agents[0].held_steps = [
        step_table(1, 1, 8, world.now, [RankStep(1, [1, 3, 5, 7], 0.5, 1.0)], agents[0].next_step())
    ]
    agents[0].status()
    assert world.job().iteration == 0
    stranger = Status(job="1", element=1, agent="nobody", sent=world.now, steps=[])
    stranger.tables = [step_table(1, 1, 8, world.now, [RankStep(1, [1, 3, 5, 7], 0.5, 1.0)], 1)]
    world.to_core(agents[0], stranger)
    assert world.job().iteration == 0
    agents[1].step(1, 1, [1, 3, 5, 7])
    assert world.job().iteration == 1 and world.job().ledger_violations == 0


def test_reports_that_were_lost_with_the_controller_are_no_violation():
    """However many iterations the ranks went on without one."""
    world, agents = trained(2, seconds=0.3)
    world.iterate("1", 0)
    world.restart()
    for agent in agents:
        agent.register()
        agent.status()
        agent.steps += 40
    agents[0].step(0, 41, [0, 2, 4, 6])
    agents[1].step(1, 42, [1, 3, 5, 7])
    world.iterate("1", 43)
    assert world.job().ledger_violations == 0
    agents[0].step(0, 44, [0, 2, 4, 6])
    agents[1].step(1, 44, [1, 3, 5])
    world.iterate("1", 45)
    assert world.job().ledger_violations == 1, "what is missing although all was heard is one"


def test_an_agent_that_is_silent_for_long_leaves_no_violation_behind():
    world, agents = trained(2, seconds=0.3)
    world.iterate("1", 0)
    for iteration in range(1, 12):
        agents[0].step(0, iteration, [0, 2, 4, 6])
    agents[1].steps += 10
    agents[1].step(1, 11, [1, 3, 5, 7])
    counted = [(step.iteration, step.unreported) for step in recorded(world, records.Step)]
    assert counted[1:11] == [(iteration, [1, 3, 5, 7]) for iteration in range(1, 11)] and counted[11] == (11, [])
    assert world.job().ledger_violations == 0


def test_an_iteration_that_calls_itself_huge_costs_what_was_reported():
    """A short message leaves a short record, and nothing is held for what nobody reported."""
    world, agents = trained(2, seconds=0.3)
    number = len(world.log)
    for iteration in range(20):
        agents[0].steps += 1  # reports were lost, so all that is missing counts as unreported
        rank = RankStep(0, [iteration], 0.5, 1.0, [])
        agent, total, generation = agents[0], 1 << 20, world.job().generation
        report = step_table(generation, iteration, total, world.now, [rank], agent.next_step())
        world.to_core(agent, Steps(job="1", element=0, agent=agent.agent, tables=[report]))
    steps = [event.record for event in world.log[number:] if isinstance(event.record, records.Step)]
    assert steps and all(len(records.encode(step)) < 1000 for step in steps)
    assert all(len(step.unreported) == 100 for step in steps)
    still_open = world.core.runtimes["1"].ledger.open.values()
    assert still_open and all(len(one.summed) == len(one.besides) == 1 for one in still_open)


@pytest.mark.parametrize("period, held", [(0.1, 0.3), (1.0, 0.2)])
def test_the_controller_reckons_with_reports_held_for_as_long_as_agents_hold_them(period: float, held: float) -> None:
    """Defect: with heartbeats as short as progress is told agents of small jobs hold reports longer than it thought."""
    world = World(heartbeat_period=period)
    agents = world.start_job(nodes=2)
    world.iterate("1", 0)
    heard = world.now
    world.run(2.0)
    agents[0].step(0, 1, [0, 2, 4, 6])
    assert world.core.view.job(world.job("1")).stepped.before == pytest.approx(heard - held)
