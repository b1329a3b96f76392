"""The threads that speak to Slurm: what is urgent overtakes, and what changes the same thing keeps its order."""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Iterator
from typing import Any

import pytest

from tests.support.processes import wait_for
from unicron_ctl.controller.model.requests import Action, Poll, Run
from unicron_ctl.controller.server import worker
from unicron_ctl.controller.server.worker import (
    LEFT_OUT,
    LONGEST_QUEUE,
    NOT_OURS,
    PUT_OFF,
    QUEUE_SHARE,
    TAKEN_OVER,
    TOO_LATE,
    Others,
    Worker,
)
from unicron_ctl.shared.log.term import Tenure
from unicron_ctl.shared.slurm.slurm_client import ElementInfo, NodeInfo, Queue, Site, SlurmError, SlurmTimeout


class SlowSlurm:
    """Each call is noted as it begins; those on what `blocked` names wait until they are let go."""

    def __init__(self) -> None:
        self.began: list[str] = []
        self.looks = 0  # at the topology
        self.blocked: set[str] = set()
        self.refused: set[str] = set()
        self.hangs: set[str] = set()
        self.go = threading.Event()
        self.asked: list[list[str]] = []
        self.passes = 0  # over the whole queue
        self.takes = 0.0
        self.clock = [1000.0]
        self.seen = Queue()
        self.private_data, self.kill_wait, self.shrinks, self.grace = frozenset, lambda: 30.0, lambda: 0, dict

    def domains(self) -> dict[str, str]:
        self.looks += 1
        if "topology" in self.refused:
            raise SlurmError("no")
        return {"n1": "s1"}

    def _call(self, what: str) -> None:
        self.began.append(what)
        if what in self.blocked:
            assert self.go.wait(60)
        if what in self.refused:
            raise SlurmError("no")
        if what in self.hangs:
            raise SlurmTimeout("no answer")

    def nodes(self) -> list[Any]:
        self._call("poll")
        return []

    def elements(self, jobs: Collection[str] | None = None) -> list[Any]:
        self.asked.append(sorted(jobs or ()))
        return []

    def others(self, but: Collection[str] = ()) -> Queue:
        self.passes += 1
        self.clock[0] += self.takes
        return self.seen

    def hold(self, job: str, element: int, comment: str) -> None:
        self._call(f"hold {job}_{element}")

    def release(self, job: str, element: int, comment: str = "") -> None:
        self._call(f"release {job}_{element}")

    def requeue_hold(self, job: str, element: int, comment: str) -> None:
        self._call(f"requeue_hold {job}_{element}")

    def down(self, node: str, reason: str) -> None:
        self._call(f"down {node}")

    def resume(self, node: str) -> None:
        self._call(f"resume {node}")


def element(job: str, state: str, node: str | None = None) -> ElementInfo:
    return ElementInfo(job, 0, job, state, node, "", "", "", "", 0)


def node_in(name: str, *states: str) -> NodeInfo:
    return NodeInfo(name, frozenset(states), "", name, 6818, 1.0, 8)


class Answers:
    """What the core would hear."""

    def __init__(self) -> None:
        self.heard: list[tuple[str, str]] = []

    def on_action(self, action: Action, error: str) -> None:
        self.heard.append((action.label, error))

    def on_actions_done(self, urgent: bool) -> None:
        self.heard.append(("all", str(urgent)))

    def on_listing(self, nodes: Any, elements: Any, site: Site, took: float) -> None:
        self.heard.append(("listing", ""))
        self.domains = site.domains


class Bench:
    def __init__(self, tenure: Tenure | None = None) -> None:
        self.slurm, self.core = SlowSlurm(), Answers()
        self.worker = Worker(self.slurm, 0.5, tenure)  # type: ignore[arg-type]

    def submit(self, *actions: Action, urgent: bool = False) -> None:
        self.worker.submit(Run(actions, urgent) if actions else Poll(), self.core)  # type: ignore[arg-type]

    def heard(self, count: int) -> list[tuple[str, str]]:
        def enough() -> bool:
            for result in self.worker.results.take_all():
                result()
            return len(self.core.heard) >= count

        wait_for(enough, f"{count} answers", now=lambda: (self.core.heard, self.slurm.began))
        return self.core.heard


@pytest.fixture
def bench() -> Iterator[Bench]:
    bench = Bench()
    yield bench
    bench.slurm.go.set()
    bench.worker.close()


def act(action: str, element: int = -1, node: str = "") -> Action:
    return Action(action, "1" if element >= 0 else "", element, node, "a test", "unicron: x")


def test_what_is_urgent_does_not_wait_behind_a_slow_listing_or_slow_actions(bench: Bench) -> None:
    """Defect: `down` waited in one queue behind calls of 10 s each."""
    bench.slurm.blocked = {"poll", "hold 1_0"}
    bench.submit()
    bench.submit(act("hold", 0), act("hold", 1))
    bench.submit(act("down", node="n3"), urgent=True)
    assert bench.heard(2) == [("down n3", ""), ("all", "True")]
    bench.slurm.go.set()
    assert bench.heard(6)[2:] == [("listing", ""), ("hold 1_0", ""), ("hold 1_1", ""), ("all", "False")]


def test_actions_on_the_same_element_or_node_keep_their_order(bench: Bench) -> None:
    bench.slurm.blocked = {"release 1_2"}
    bench.submit(act("release", 2), act("resume", node="n3"))
    wait_for(lambda: bench.slurm.began == ["release 1_2"], "the first is under way")
    bench.submit(act("down", node="n3"), act("requeue_hold", 2), urgent=True)
    bench.submit(act("hold", 2))
    bench.slurm.go.set()
    bench.heard(8)
    began = bench.slurm.began
    assert began.index("release 1_2") < began.index("requeue_hold 1_2") < began.index("hold 1_2")
    assert began.index("resume n3") < began.index("down n3")


def test_what_follows_an_action_that_failed_is_left_out_and_heard_of(bench: Bench) -> None:
    bench.slurm.refused = {"release 1_0"}
    bench.submit(act("release", 0), act("hold", 0), act("hold", 1))
    assert bench.heard(4) == [("release 1_0", "no"), ("hold 1_0", LEFT_OUT), ("hold 1_1", ""), ("all", "False")]
    assert "hold 1_0" not in bench.slurm.began
    bench.submit(act("hold", 0))
    assert bench.heard(6)[4:] == [("hold 1_0", ""), ("all", "False")]


def test_of_many_actions_none_waits_for_a_slurm_that_hangs_but_the_first(bench: Bench) -> None:
    """Defect: 1,000 holds of 10 s each kept every listing waiting."""
    bench.slurm.hangs = {"hold 1_1"}
    bench.submit(*(act("hold", element) for element in range(1000)))
    bench.submit()
    heard = bench.heard(1002)
    assert heard[:3] == [("hold 1_0", ""), ("hold 1_1", "no answer"), ("hold 1_2", PUT_OFF)]
    assert heard[1000:] == [("all", "False"), ("listing", "")] and len(bench.slurm.began) == 3


def test_slurm_is_listed_again_before_a_long_run_is_through(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is left is decided anew."""
    monkeypatch.setattr(worker, "RUN_SECONDS", 0.0)
    bench.submit(*(act("hold", element) for element in range(3)))
    assert bench.heard(4) == [("hold 1_0", ""), ("hold 1_1", PUT_OFF), ("hold 1_2", PUT_OFF), ("all", "False")]


@pytest.mark.parametrize(("refused", "domains"), [(set(), {"n1": "s1"}), ({"topology"}, {})])
def test_topology_is_read_with_a_listing_not_with_each_and_spoils_none(
    bench: Bench, refused: set, domains: dict
) -> None:
    bench.slurm.refused = refused
    bench.submit()
    bench.submit()
    assert bench.heard(2) == [("listing", "")] * 2
    assert bench.core.domains == domains and bench.slurm.looks == 1


# ---------------------------------------------------------------- the whole queue
@pytest.fixture
def slurm(monkeypatch: pytest.MonkeyPatch) -> SlowSlurm:
    found = SlowSlurm()
    monkeypatch.setattr(worker.time, "monotonic", lambda: found.clock[0])
    return found


def test_only_the_jobs_that_matter_are_asked_for_in_detail(bench: Bench) -> None:
    bench.worker.submit(Poll(frozenset({"7", "9"})), bench.core)  # type: ignore[arg-type]
    bench.heard(1)
    assert bench.slurm.asked == [["7", "9"]]


@pytest.mark.parametrize("takes", [0.02, 2.0, 20.0])
def test_the_whole_queue_is_read_as_seldom_as_it_takes_long(slurm: SlowSlurm, takes: float) -> None:
    others, slurm.takes = Others(slurm), takes  # type: ignore[arg-type]
    began = slurm.clock[0]
    for _ in range(600):
        others.read([], [], Poll())
        slurm.clock[0] += 2.0
    spent = slurm.passes * takes / (slurm.clock[0] - began)
    assert slurm.passes >= 600 * 2.0 / (LONGEST_QUEUE + takes) - 1
    assert spent <= 1.2 * max(QUEUE_SHARE, takes / LONGEST_QUEUE)
    assert (slurm.passes == 600) is (takes == 0.02), "a short queue is read with each listing"


def test_where_somebody_is_asked_about_the_queue_is_read_sooner(slurm: SlowSlurm) -> None:
    others, slurm.takes = Others(slurm), 1.0  # type: ignore[arg-type]
    for _ in range(30):
        others.read([], [], Poll(all=True))
        slurm.clock[0] += 2.0
    assert 8 <= slurm.passes <= 16


def test_between_two_looks_at_the_queue_the_nodes_themselves_tell(slurm: SlowSlurm) -> None:
    """Who has left is seen, and who has come: nobody is given a node that is in use."""
    others, slurm.takes = Others(slurm), 2.0  # type: ignore[arg-type]
    slurm.seen = Queue([element("1", "RUNNING", "n[1-2]"), element("2", "RUNNING", "n3"), element("3", "PENDING")])
    own = [element("7", "RUNNING", "n5")]
    nodes = [node_in("n1", "MIXED"), node_in("n2", "ALLOCATED"), node_in("n3", "IDLE"), node_in("n4", "ALLOCATED")]
    nodes.append(node_in("n5", "ALLOCATED"))
    assert others.read(nodes, own, Poll(frozenset("7"))) == slurm.seen.elements, "they are as they are"
    later = others.read(nodes, own, Poll(frozenset("7")))
    assert [(e.label, e.node) for e in later] == [("1_0", "n[1-2]"), ("3_0", None), ("another job", "n4")]
    ended = others.read(nodes, [], Poll(frozenset("7")))
    assert "n5" not in {e.node for e in ended}, "the node of one of ours that has just ended is nobody else's"
    assert "n5" in {e.node for e in others.read(nodes, [], Poll(frozenset("7")))}
    assert slurm.passes == 1


def test_the_queue_is_read_at_once_where_one_of_ours_begins_on_a_node_that_another_had(slurm: SlowSlurm) -> None:
    """Defect: another's job had ended, and the queue, seldom read on a busy machine, still had it on the node. Once one
    of ours ran there the plan counted the node as another's, and took it away; then it was free, and the plan gave it
    back: seven requeues in 25 s."""
    others, slurm.takes = Others(slurm), 2.0  # type: ignore[arg-type]
    slurm.seen = Queue([element("1", "RUNNING", "n1"), element("2", "RUNNING", "n2")])
    poll, nodes = Poll(frozenset("7")), [node_in("n1", "ALLOCATED"), node_in("n2", "MIXED")]
    shared = [element("7", "RUNNING", "n2")]
    for _ in range(3):
        assert {e.job for e in others.read(nodes, shared, poll)} == {"1", "2"}
    assert slurm.passes == 1, "a node that both have is no reason to read it again"
    slurm.seen = Queue([element("2", "RUNNING", "n2")])
    for _ in range(3):
        assert {e.job for e in others.read(nodes, [*shared, element("7", "RUNNING", "n1")], poll)} == {"2"}
    assert slurm.passes == 2


def test_a_job_that_has_become_ours_is_none_of_the_others(slurm: SlowSlurm) -> None:
    others, slurm.takes = Others(slurm), 2.0  # type: ignore[arg-type]
    slurm.seen = Queue([element("7", "RUNNING", "n1"), element("8", "PENDING")])
    assert len(others.read([], [], Poll())) == 2
    assert [e.job for e in others.read([], [], Poll(frozenset("7")))] == ["8"]


def test_lists_of_nodes_that_were_cut_leave_no_node_free_that_is_in_use(slurm: SlowSlurm) -> None:
    others = Others(slurm)  # type: ignore[arg-type]
    slurm.seen = Queue([element("1", "RUNNING", "n1")], cut=True)
    found = others.read([node_in("n1", "ALLOCATED"), node_in("n2", "MIXED")], [], Poll())
    assert [e.node for e in found] == ["n1", "n2"]


def test_after_a_take_over_nothing_is_changed_until_the_calls_before_have_ended(bench: Bench) -> None:
    bench.worker.not_before = time.monotonic() + 60.0
    bench.submit(act("hold", 1))
    assert bench.heard(2)[0][1] == TAKEN_OVER
    bench.worker.not_before = time.monotonic()
    bench.submit(act("hold", 2))
    assert bench.heard(4)[2][1] == "" and bench.slurm.began == ["hold 1_2"]


def test_who_may_not_act_changes_nothing_in_slurm() -> None:
    clock = [100.0]
    tenure = Tenure(2.5, lambda: clock[0])
    bench = Bench(tenure)
    tenure.note_renewal(clock[0])
    bench.submit(act("hold", 1))
    assert bench.heard(2)[0][1] == ""
    clock[0] += 2.6
    bench.submit(act("hold", 2))
    assert bench.heard(4)[2][1] == NOT_OURS and bench.slurm.began == ["hold 1_1"]
    bench.worker.close()


def power_off(program: str, seconds: float) -> Action:
    """The node is switched off if that begins within so many seconds."""
    return Action("power_off", "1", 0, "n3", "a test", f"{program} %n", not_after=time.time() + seconds)


def test_a_node_is_not_switched_off_long_after_it_was_lost(bench: Bench) -> None:
    """Defect: while other programs hung it waited in a queue, and then hit a node that was back."""
    bench.submit(power_off("/bin/false", -0.1), urgent=True)
    assert bench.heard(2)[0][1] == TOO_LATE
    bench.submit(power_off("/bin/true", 60.0), urgent=True)
    assert bench.heard(4)[2][1] == ""


def test_the_end_waits_for_no_program_that_switches_a_node_off(bench: Bench) -> None:
    bench.submit(power_off("/bin/sh -c 'sleep 600'", 60.0), urgent=True)
    wait_for(lambda: bench.worker._changing, "it is under way")
    began = time.monotonic()
    bench.worker.let_changes_end(30.0)
    assert "was killed, because unicrond ends" in bench.heard(2)[0][1]
    bench.worker._switches.shutdown()
    assert time.monotonic() - began < 20.0


def test_the_end_waits_for_changes_that_are_under_way(bench: Bench) -> None:
    bench.slurm.blocked.add("hold 1_1")
    bench.submit(act("hold", 1))
    wait_for(lambda: bench.slurm.began, "it is under way")
    began = time.monotonic()
    bench.worker.let_changes_end(0.2)
    assert time.monotonic() - began >= 0.2
    threading.Timer(0.1, bench.slurm.go.set).start()
    bench.worker.let_changes_end(30.0)
    assert time.monotonic() - began < 20.0
    bench.submit(act("hold", 2))
    assert bench.heard(4)[2][1] == TAKEN_OVER
