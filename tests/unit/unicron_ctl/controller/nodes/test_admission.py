"""Which node may come back, and what is known of the nodes' health."""

from __future__ import annotations

import msgspec
import pytest

from tests.support.clock import START
from tests.support.questions import told
from tests.support.scenarios import tell
from tests.support.world import FakeSlurm, World
from unicron_ctl.controller.api import answers
from unicron_ctl.controller.api.node_answers import visible_nodes
from unicron_ctl.controller.model.asker import EVERYBODY
from unicron_ctl.controller.model.node_state import HealthReport
from unicron_ctl.controller.nodes.readmission import Admission, Report, decide
from unicron_ctl.shared.commands import status_tables
from unicron_ctl.shared.log import records
from unicron_ctl.shared.protocol.answer_schema import Node
from unicron_ctl.shared.system.columns import show
from unicron_detector.failures.escalation_table import State
from unicron_detector.failures.fault_history import Fault
from unicron_detector.failures.severity import Severity


# ---------------------------------------------------------------- the controller's decision
def health(verdict: str, checked_at: float) -> HealthReport:
    return HealthReport(verdict, "why", "interval", checked_at, checked_at)


@pytest.mark.parametrize(
    ("policy", "report", "anybody", "waited", "admit", "verified"),
    [
        ("prefer", health("good", START), True, 0, True, True),
        ("prefer", health("warning", START + 5), True, 0, True, True),
        ("prefer", health("good", START - 3), True, 0, True, True),  # as its slurmd was starting
        ("require", health("good", START), True, 0, True, True),
        ("prefer", health("good", START - 6), True, 5, False, False),  # of before its slurmd was started
        ("prefer", health("good", START - 6), True, 30, True, False),
        ("prefer", health("unknown", START + 1), True, 5, False, False),
        ("prefer", health("unknown", START + 1), True, 31, True, False),
        ("prefer", None, True, 5, False, False),
        ("prefer", None, True, 30, True, False),
        ("prefer", None, False, 0, True, False),  # nobody reports: waiting is of no use
        ("require", None, False, 1e9, False, False),
        ("require", health("unknown", START + 1), True, 1e9, False, False),
        ("prefer", health("bad", START + 1), True, 1e9, False, False),
        ("prefer", health("bad", START - 9), True, 1e9, False, False),  # nothing has said otherwise since
        ("require", health("bad", START + 1), True, 1e9, False, False),
        ("off", health("bad", START + 1), True, 0, True, True),
        ("off", None, False, 0, True, True),
    ],
)
def test_who_may_come_back(policy, report, anybody, waited, admit, verified) -> None:
    found = decide(policy, 30.0, report, anybody, START, waited)
    assert (found.admit, found.verified) == (admit, verified) and found.reason
    assert isinstance(found, Admission)


@pytest.mark.parametrize(
    "wrong",
    [{"node": ""}, {"source": "rumour"}, {"verdict": "fine"}, {"at": "now"}, {"at": True}, {"at": -1}, {"at": 1e99}],
)
def test_a_report_that_makes_no_sense_is_refused(wrong: dict) -> None:
    good = {"node": "n1", "source": "interval", "verdict": "good", "reason": "a\nb", "at": 5}
    report = Report(node="n1", source="interval", verdict="good", reason="a b", at=5.0)
    assert msgspec.convert(good, Report) == report
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert({**good, **wrong}, Report)


# ---------------------------------------------------------------- in the running controller
def lost_node(**settings) -> tuple[World, FakeSlurm]:
    """A node that Unicron set down, and whose slurmd has just come back."""
    slurm = FakeSlurm(2)
    world = World(slurm, **settings)
    world.core.append("", 0, records.NodeLost(node="n2", element=0, reason="test"))
    lost = "unicron[node_problem]: lost"
    world.core.append("", 0, records.SlurmAction(action="down", node="n2", element=-1, slurm_reason=lost))
    slurm.down("n2", lost)
    slurm.calls.clear()
    world.run(2.0)
    assert slurm.node_states["n2"] == {"DOWN"}
    slurm.starts["n2"] = world.now
    return world, slurm


def row_of(world: World, node: str) -> dict:
    show([status_tables.nodes(visible_nodes(world.core, EVERYBODY))])
    return next(item for item in told(world.core, "nodes") if item["node"] == node)


def test_clocks_that_were_set_keep_no_node_out_of_service() -> None:
    """This host's clock may be an hour ahead of the node's: which slurmd it is, Slurm's own times say."""
    slurm = FakeSlurm(2)
    world = World(slurm, admission="off")
    slurm.starts["n2"] = world.now - 7200.0
    world.core.append("", 0, records.NodeLost(node="n2", element=0, slurmd_start=world.now - 7200.0, reason="test"))
    lost = "unicron[node_problem]: lost"
    world.core.append("", 0, records.SlurmAction(action="down", node="n2", element=-1, slurm_reason=lost))
    slurm.down("n2", lost)
    world.dead_nodes.add("n2")  # this controller's own sockets do not reach it
    world.run(5.0)
    assert slurm.node_states["n2"] == {"DOWN"}, "it is the slurmd that was lost"
    slurm.starts["n2"] = world.now - 3600.0
    world.run(5.0)
    assert slurm.node_states["n2"] == {"IDLE"}


def test_a_node_comes_back_with_its_passed_checks() -> None:
    world, slurm = lost_node()
    tell(world, "n1", "good")  # others report, so it is waited for
    world.run(5.0)
    assert slurm.node_states["n2"] == {"DOWN"} and "waiting for one" in row_of(world, "n2")["admission"]
    tell(world, "n2", "good")
    world.run(2.0)
    node = row_of(world, "n2")
    assert slurm.node_states["n2"] == {"IDLE"} and not node["unverified"] and node["health"]["verdict"] == "good"
    assert "passed the admission checks" in next(e for e in world.log if e.kind == "node_resumed").record.reason


def test_a_node_that_is_proven_bad_stays_down_until_it_is_mended() -> None:
    world, slurm = lost_node()
    tell(world, "n2", "bad", "memory: 7 of 8 GB")
    world.run(100.0)
    assert slurm.node_states["n2"] == {"DOWN"}
    assert len([e for e in world.log if e.kind == "admission_waits"]) == 1
    assert "memory: 7 of 8 GB" in row_of(world, "n2")["admission"]
    tell(world, "n2", "good")
    world.run(2.0)
    assert slurm.node_states["n2"] == {"IDLE"}


def test_without_a_report_in_time_it_comes_back_unverified() -> None:
    world, slurm = lost_node(admission_seconds=10.0)
    tell(world, "n1", "good")
    world.run(8.0)
    assert slurm.node_states["n2"] == {"DOWN"}
    world.run(4.0)
    assert slurm.node_states["n2"] == {"IDLE"} and row_of(world, "n2")["unverified"]
    tell(world, "n2", "good")
    assert not row_of(world, "n2")["unverified"]


def test_required_checks_are_waited_for() -> None:
    world, slurm = lost_node(admission="require")
    world.run(200.0)
    assert slurm.node_states["n2"] == {"DOWN"} and 'admission = "require"' in row_of(world, "n2")["admission"]


def test_what_is_set_down_is_a_suspect_until_a_paired_test_clears_it() -> None:
    world, _ = lost_node()
    assert row_of(world, "n2")["suspect"] == "unicron[node_problem]: lost" and not row_of(world, "n1")["suspect"]
    tell(world, "n2", "good")
    assert row_of(world, "n2")["suspect"], "checks of the node alone do not clear it"
    tell(world, "n2", "good", source="pair-test")
    node = row_of(world, "n2")
    assert not node["suspect"] and node["pair_test"]["verdict"] == "good" and node["health"]["source"] == "interval"


@pytest.mark.by_hand
def test_two_moments_of_hardware_faults_make_a_suspect() -> None:
    world = World(FakeSlurm(2))
    world.run(1.5)
    for ago, shown in ((100.0, False), (50.0, True)):
        fault = Fault(world.now - ago, "1", 0, "n1", "gpu_lost", "hardware", Severity.SEV2)
        world.core.state.history.record(fault, State.RESTARTING)
        assert bool(row_of(world, "n1")["suspect"]) == shown
    tell(world, "n1", "good", source="pair-test")
    assert not row_of(world, "n1")["suspect"] and row_of(world, "n1")["health"] is None


def test_the_log_holds_news_only() -> None:
    world = World(FakeSlurm(2))
    world.run(1.5)
    for number, verdict in enumerate(("good", "good", "good", "bad", "bad", "good")):
        world.run(60.0)
        tell(world, "n1", verdict, f"took {number}.5 s")
    assert [e.record.verdict for e in world.log if e.kind == "node_health"] == ["good", "bad", "good"]
    assert row_of(world, "n1")["health"]["at"] == world.core.now
    with pytest.raises(answers.Unanswerable, match="no node 'n77'"):
        tell(world, "n77", "good")


def test_the_health_column(snapshot) -> None:
    def text(**keys) -> str:
        node = dict(node="n1", states=[], healthy=True, reason="", used_by=[], downed_by_unicron=False, lost_at=None)
        node |= dict(last_heard=None, asked_since=None, spare_of={})
        return status_tables.health(msgspec.convert({**node, **keys}, Node)).plain

    report = {"reason": "memory: gone", "source": "interval", "at": 0.0}
    assert text() == text(health=None) == "unknown"
    assert text(health={**report, "verdict": "good"}).startswith("ok (")
    assert text(health={**report, "verdict": "warning"}).startswith("ok (")
    assert text(health={**report, "verdict": "bad"}).startswith("bad: memory: gone (")
    assert text(unverified=True, suspect="flaps") == snapshot
