"""Recovery in the ranks: kills, hangs, broken connections and errors at every point of an iteration and of a recovery.

Real ranks, ZeroMQ and gloo; Megatron-core training on CPU. Each run's ledgers are checked as a whole (`proof`), then
what the run is about. Faults that do not get in each other's way share a run.
"""

from __future__ import annotations

import pytest

from tests.support import proof
from tests.support.moments import fault
from tests.support.rank_harness import Ranks

pytestmark = pytest.mark.process

ITERATIONS, MOST = 6, 22  # of most runs; of those in which a rank comes back
GRADIENTS = 1e-7  # largest absolute difference in fp32, where other members add the micro-batches in another order
LOSSES = 1e-5  # of about 5


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """Nothing fails: the gradients and losses that every other run has to show."""
    out = tmp_path_factory.mktemp("reference")
    ranks = Ranks(out, 4, [], fork=True, TINY_ITERATIONS=str(MOST))
    ranks.drive()
    assert not ranks.breaks and set(map(tuple, ranks.exits.values())) == {(0,)}
    proof.exactly_once(ranks, MOST)
    return out


@pytest.fixture
def run(reference, tmp_path):
    """Run ranks with faults, and prove what must hold of every run."""

    def go(*faults: dict, size: int = 4, iterations: int = ITERATIONS, fork: bool = True, **keywords) -> Ranks:
        ranks = Ranks(tmp_path, size, list(faults), fork=fork, TINY_ITERATIONS=str(iterations), **keywords)
        ranks.drive()
        proof.exactly_once(ranks, iterations)
        proof.nothing_thrown_away(ranks)
        wanted = proof.losses(reference)
        for iteration, values in proof.losses(tmp_path).items():
            assert len(values) == 1, f"iteration {iteration}: members report {values}"
            assert abs(values.pop() - next(iter(wanted[iteration]))) <= LOSSES
        differences = proof.gradient_differences(tmp_path, reference, min(ITERATIONS, iterations))
        assert max(differences.values()) <= GRADIENTS, differences
        return ranks

    return go


def steppers(ranks: Ranks, iteration: int) -> set[int]:
    return {step["slot"] for step in ranks.steps if step["iteration"] == iteration}


def resumes(ranks: Ranks) -> list[tuple[list[int], int | None, int]]:
    """(members, step, iteration) of every plan that answered a Break."""
    return [(plan.members, plan.step, plan.iteration) for plan in ranks.plans[1:] if not plan.boundary]


def recomputed(ranks: Ranks, iteration: int) -> int:
    """How many micro-batches of an iteration were fetched more than once: what the lost ranks had begun."""
    work = [index for has in proof.fetched(ranks.out)[iteration].values() for index in has]
    return len(work) - len(set(work))


def test_killed_before_in_the_middle_and_alone(run):
    """Before the first micro-batch; rank 0 in the middle, having finished one; and the last but one."""
    ranks = run(fault(3, 1, "fetch", 0), fault(0, 2, "fetch", 1), fault(2, 3, "fetch", 2))
    assert resumes(ranks) == [([0, 1, 2], None, 1), ([1, 2], None, 2), ([1], None, 3)]
    assert [recomputed(ranks, iteration) for iteration in range(5)] == [0, 0, 1, 2, 0]
    assert steppers(ranks, 3) == {1}


@pytest.mark.wide  # agents start such, too (test_warm_ranks)
def test_processes_of_their_own(run):
    """As an agent starts them, from import to exit."""
    ranks = run(fault(1, 1, "fetch", 2), size=2, fork=False)
    assert resumes(ranks) == [([0], None, 1)] and ranks.exits == {0: [0], 1: [-9]}


def test_killed_around_the_reduce(run):
    """Before the reduce; between the reduce and the commit, which keeps the dead rank's part; alone at last."""
    ranks = run(fault(1, 1, "reduce", 0), fault(0, 2, "reduce", 2), fault(3, 4, "reduce", 1))
    assert resumes(ranks) == [([0, 2, 3], None, 1), ([2, 3], 2, 3), ([2], None, 4)]
    assert recomputed(ranks, 1) == 2 and recomputed(ranks, 2) == 0
    kept = {index for step in ranks.steps if step["iteration"] == 2 for index in step["micro_batches"]}
    assert len(kept) == 8 - 3, "rank 0's part was in the reduced gradient and was not computed again"


@pytest.mark.parametrize("overlap", [pytest.param("0", marks=pytest.mark.long), "1"])
def test_killed_in_the_middle_of_the_reduce(run, overlap):
    """While the buckets are on their way; with overlap also in the first iteration, whose hooks start nothing."""
    ranks = run(
        fault(3, 0, "reduce", 2 if overlap == "1" else 1, kind="late", delay=0.0005),
        fault(2, 2, "reduce", 4 if overlap == "1" else 1, kind="late", delay=0.001),
        fault(1, 4, "reduce", 3 if overlap == "1" else 0, kind="late", delay=0.0003),
        TINY_OVERLAP=overlap,
    )
    assert [members for members, _, _ in resumes(ranks)] == [[0, 1, 2], [0, 1], [0]]
    for (_, _, iteration), struck in zip(resumes(ranks), (0, 2, 4), strict=True):
        assert iteration in (struck, struck + 1), "on a busy machine the last survivor may get to the commit first"


def test_some_committed_and_others_not(run):
    """Rank 2 sees an error although its peers' commit was complete: they have stepped, and so must it."""
    ranks = run(fault(2, 1, "reduced", 2, kind="error", delay=0.5), fault(1, 3, "step"), TINY_OVERLAP="0")
    first, second = ranks.reports[0], ranks.reports[1]
    assert (first[2].phase, first[2].iteration) == ("synced", 1)
    assert any(status.phase == "stepped" or status.iteration == 2 for status in first.values())
    members, step, iteration = resumes(ranks)[0]
    assert {*members} | ranks.stuck == {0, 1, 2, 3} and (step, iteration) == (1, 2)
    assert all(status.iteration >= 3 for status in second.values())
    assert steppers(ranks, 1) | ranks.stuck == {0, 1, 2, 3} and steppers(ranks, 3) | ranks.stuck == {0, 2, 3}
    assert recomputed(ranks, 1) == recomputed(ranks, 3) == 0


def test_connections_break_and_nobody_is_dead(run):
    """The same members go on, and nothing at all is computed again, but for a rank that gloo has lost."""
    ranks = run(fault(0, 1, "fetch", 1, kind="gloo"), fault(3, 3, "reduce", 1, kind="gloo"))
    assert len(resumes(ranks)) == 2 and all(
        {*members} | ranks.stuck == {0, 1, 2, 3} for members, _, _ in resumes(ranks)
    )
    assert len(ranks.stuck) <= 1
    assert ranks.stuck or not any(recomputed(ranks, iteration) for iteration in range(ITERATIONS))
    assert ranks.exits == {slot: [-9] if slot in ranks.stuck else [0] for slot in range(4)}


def test_two_killed_at_once_and_a_hang(run):
    """Two in one iteration; then one that is stopped, found and killed."""
    ranks = run(fault(1, 1, "fetch", 1), fault(2, 1, "reduce", 0), fault(3, 3, "fetch", 1, kind="hang"), hang_limit=0.5)
    assert steppers(ranks, 1) == {0, 3} and steppers(ranks, 3) == {0}
    assert ranks.exits == {0: [0], 1: [-9], 2: [-9], 3: [-9]}


def test_an_error_of_the_script_is_not_healed_in_place(run):
    """The rank that raised ends with its error; the others go on. So does one whose gradient is half a micro-batch."""
    ranks = run(fault(1, 1, "fetch", 1, kind="raise"), fault(0, 3, "fetch", 1), fault(2, 3, "backward", 1, kind="lost"))
    assert ranks.exits == {0: [-9], 1: [1], 2: [1], 3: [0]}
    assert {(slot, kind) for slot, kind, _ in ranks.faults} >= {(1, "ValueError"), (2, "RuntimeError")}
    assert steppers(ranks, 1) == {0, 2, 3} and steppers(ranks, 3) == {3}


def test_a_second_failure_in_the_resumed_part(run):
    """While the lost micro-batches are computed again; while they are reduced."""
    ranks = run(
        *(fault(1, 1, "fetch", 0, others=[2]), fault(2, 1, "fetch", recovery=1)),
        *(fault(0, 3, "fetch", 1, others=[4]), fault(4, 3, "reduce", recovery=1)),
        size=5,
    )  # fmt: skip
    assert steppers(ranks, 1) == {0, 3, 4} and steppers(ranks, 3) == {3}
    assert recomputed(ranks, 1) <= 2 and len([lost for _, lost, _ in ranks.breaks if lost]) == 4


@pytest.mark.parametrize(
    "at",
    [pytest.param("enter", marks=pytest.mark.wide), pytest.param("world", marks=pytest.mark.long), "entered"],
)
def test_a_second_failure_while_groups_are_rebuilt(run, at):
    """Before, in the middle, and after the building of the groups, and at some moment of it."""
    ranks = run(
        *(fault(5, 1, "fetch", 0, others=[4]), fault(4, 1, at)),
        *(fault(3, 3, "fetch", 1, others=[2]), fault(2, 3, at, kind="late", delay=0.002)),
        size=6,
    )  # fmt: skip
    assert steppers(ranks, 1) | ranks.stuck == {0, 1, 2, 3} and steppers(ranks, 3) | ranks.stuck == {0, 1} | ranks.stuck
    assert len(ranks.breaks) >= 4


def test_a_restarted_rank_rejoins_and_fails_again(run):
    """It dies as the first generation forms, as it receives the state, and as a member; it is a member in the end."""
    ranks = run(
        fault(2, -1, "enter"),
        fault(0, 5, "fetch", kind="wait", gate=1),
        fault(2, 1, "fetch", incarnation=1),
        fault(2, -1, "transfer", incarnation=2),
        fault(0, 12, "fetch", kind="wait", gate=2),
        iterations=MOST,
        restart=True,
    )
    assert ranks.exits[2][:-1] == [-9, -9, -9] and ranks.exits[2][-1] == 0
    assert not ranks.reformed
    assert steppers(ranks, MOST - 1) == {0, 1, 2, 3}


def test_a_member_leaves_and_comes_back(run):
    """A boundary plan without it, then one with it as a newcomer: it is given the state, and nothing breaks."""
    ranks = run(fault(0, 6, "fetch", kind="wait", gate=2), iterations=MOST, leave={3: 1}, comeback=True)
    assert not ranks.breaks and all(codes == [0] for codes in ranks.exits.values())
    without = [iteration for iteration in range(MOST) if steppers(ranks, iteration) == {0, 1, 2}]
    assert without and without == list(range(without[0], without[-1] + 1))
    assert steppers(ranks, MOST - 1) == {0, 1, 2, 3}


@pytest.mark.wide
def test_a_member_dies_while_another_comes_back(run):
    """The leaver's way back breaks: it is a newcomer still, and gets in with the next offer."""
    ranks = run(
        fault(0, 6, "fetch", kind="wait", gate=2),
        fault(2, "any", "transfer"),
        iterations=MOST,
        leave={3: 1},
        comeback=True,
    )
    assert ranks.exits == {0: [0], 1: [0], 2: [-9], 3: [0]}
    assert steppers(ranks, MOST - 1) == {0, 1, 3}


def test_a_leaver_is_let_go(run):
    """A boundary plan without one member: no Break, nothing computed again."""
    ranks = run(iterations=20, leave={0: 1})
    assert not ranks.breaks and ranks.exits[0] == [-9] and steppers(ranks, 19) == {1, 2, 3}


@pytest.mark.wide
def test_a_wish_to_stop_outlives_a_failure(run):
    """One rank asks for the end in the iteration in whose commit another's connections break: all end after it."""
    ranks = run(fault(1, 3, "fetch", kind="stop"), fault(2, 3, "reduced", 2, kind="error"), iterations=4)
    assert ranks.exits == {slot: [-9] if slot in ranks.stuck else [0] for slot in range(4)}
    assert max(step["iteration"] for step in ranks.steps) == 3
