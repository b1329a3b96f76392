"""The one way to drain a node: which reason it gets, when it is left as it is, how many may be, and that there is no
other way."""

from __future__ import annotations

import ast
import contextlib
import re
from dataclasses import replace

import pytest

from tests.support.clock import START
from tests.support.processes import ROOT
from tests.support.rooms import is_gone
from unicron_ctl.controller.model.requests import Action
from unicron_ctl.controller.server.worker import perform
from unicron_ctl.shared.slurm import drains
from unicron_ctl.shared.slurm.slurm_client import NodeInfo, SlurmError
from unicron_planner.simulate.formats import OF_PROGRAMS


def info(*states: str, reason: str = "") -> NodeInfo:
    return NodeInfo("n1", frozenset(states), reason, "127.0.0.1", 1, START, 0)


class Slurm:
    """A Slurm with these nodes."""

    def __init__(self, *listed: NodeInfo) -> None:
        self.listed, self.asked, self.reasons = list(listed), list[str](), list[str]()

    def nodes(self) -> list[NodeInfo]:
        return self.listed

    def drain(self, node: str, reason: str) -> None:
        self.asked.append(node)
        self.reasons.append(reason)


BAD = drains.drain_reason(drains.HEALTH, "x")


@pytest.mark.parametrize("states", [["IDLE"], ["ALLOCATED"], ["MIXED"]])
def test_a_node_in_service_is_drained_with_our_leader(states: list[str]) -> None:
    slurm = Slurm(info(*states))
    said = drains.drain_node(slurm, "n1", drains.drain_reason(drains.HEALTH, "gpu:\n 7 of  8"))
    assert slurm.reasons == ["unicron[health]: gpu: 7 of 8"] and said == f"n1 is drained: {slurm.reasons[0]}"


@pytest.mark.parametrize("leader", [drains.HEALTH, drains.LOST_NODE])
def test_a_reason_is_one_line_of_a_length_and_everybody_knows_it_for_ours(leader: str) -> None:
    reason = drains.drain_reason(leader, "a\r\nb\x0b" + "c" * 300)
    assert reason.startswith(f"{leader}: a b ccc") and len(reason) == drains.REASON_LENGTH
    assert drains.ours(info("IDLE", "DRAIN", reason=reason)) and drains.ours(info("DOWN", reason=reason))
    assert not drains.ours(info("IDLE", reason=reason)), "it is in service"
    assert OF_PROGRAMS.match(reason), "the simulator counts it as an outage"
    odd = drains.drain_reason(leader, "\x1b]0;gone\x07 Lüfter")
    assert odd == f"{leader}: \\x1b]0;gone\\x07 Lüfter", "sinfo prints a reason as it is"


@pytest.mark.parametrize("reason", ["", "Not responding", "Node unexpectedly rebooted"])
def test_a_node_that_slurm_itself_set_down_is_drained(reason: str) -> None:
    slurm = Slurm(info("DOWN", reason=reason))
    drains.drain_node(slurm, "n1", BAD)
    assert slurm.reasons == ["unicron[health]: x"]


@pytest.mark.parametrize(
    ("node", "words"),
    [
        (info("IDLE", "DRAIN", reason="NHC: fan"), "drained already (NHC: fan)"),
        (info("IDLE", "DRAIN", reason="unicron[health]: old"), "drained already (unicron[health]: old)"),
        (info("IDLE", "FAIL"), "drained already (no reason given)"),
        (info("DOWN", reason="bad board, ticket 7"), "down already (bad board, ticket 7)"),
        (info("DOWN", reason="unicron[node_problem]: lost"), "down already"),
    ],
)
def test_a_node_that_is_out_of_service_is_left_as_it_is(node: NodeInfo, words: str) -> None:
    slurm = Slurm(node)
    assert words in drains.drain_node(slurm, "n1", BAD) and not slurm.asked


def test_a_node_that_slurm_does_not_know_is_an_error() -> None:
    with pytest.raises(SlurmError, match="does not know node n1"):
        drains.drain_node(Slurm(), "n1", BAD)


def test_another_tools_note_on_a_node_in_service_is_kept() -> None:
    slurm = Slurm(info("IDLE", "MAINTENANCE", reason="do not use after 6"))
    drains.drain_node(slurm, "n1", BAD)
    assert slurm.reasons == ["do not use after 6; unicron[health]: x"]


@pytest.mark.parametrize(("states", "reason"), [(["IDLE", "DRAIN"], "fan 2"), (["DOWN"], "burnt"), (["FAIL"], "fan")])
def test_the_controller_overwrites_no_reason_that_somebody_gave_since_it_looked(states: list[str], reason: str) -> None:
    """Defect: an admin's drain between the controller's listing and its own lost its reason, and was taken back once
    the checks passed."""
    slurm = Slurm(info(*states, reason=reason))
    perform(slurm, Action("drain", "", -1, "n1", "proven bad", BAD))
    assert not slurm.asked


class Cluster(Slurm):
    """A Slurm whose other nodes are drained."""

    def __init__(self, nodes: int, drained: int, reason: str) -> None:
        plain, out = info("IDLE", reason=reason), info("IDLE", "DRAIN", reason=reason)
        super().__init__(*(replace(out if 1 <= i <= drained else plain, name=f"n{i + 1}") for i in range(nodes)))


def test_nodes_that_drain_at_the_same_moment_are_no_more_than_the_limit_either() -> None:
    """The prologs of a large job run at once, and all see that nobody is drained."""

    class Together(Cluster):
        def nodes(self) -> list[NodeInfo]:
            drained = [f"n{number}" for number in range(1, 6)] if self.asked else []
            reason, states = BAD, frozenset({"IDLE", "DRAIN"})
            return [replace(n, states=states, reason=reason) if n.name in drained else n for n in self.listed]

        def resume(self, node: str) -> None:
            self.asked.append(f"not {node}")

    for most, done in ((4, ["n1", "not n1"]), (5, ["n1"])):
        cluster = Together(20, 0, "")
        with pytest.raises(drains.TooMany) if len(done) > 1 else contextlib.nullcontext():
            drains.drain_node(cluster, "n1", BAD, most)
        assert cluster.asked == done


def test_an_admins_drain_of_the_same_moment_stays() -> None:
    class Taken(Cluster):
        def nodes(self) -> list[NodeInfo]:
            said = "fan; do not resume" if self.asked else ""
            return [
                replace(self.listed[0], states=frozenset({"IDLE", "DRAIN"} if said else {"IDLE"}), reason=said),
                *(
                    replace(n, states=frozenset({"IDLE", "DRAIN"}), reason="x; unicron[health]: y") if said else n
                    for n in self.listed[1:]
                ),
            ]

    cluster = Taken(5, 0, "")
    with pytest.raises(drains.TooMany):
        drains.drain_node(cluster, "n1", BAD, 2)
    assert cluster.asked == ["n1"]


def test_a_node_that_slurm_has_down_stays_down_where_there_are_too_many() -> None:
    """Nobody takes it: no more is taken by its drain, and a resume would give it back."""

    class Down(Cluster):
        def nodes(self) -> list[NodeInfo]:
            mine = replace(self.listed[0], states=frozenset({"DOWN"}), reason="Low RealMemory")
            reason, states = BAD, frozenset({"IDLE", "DRAIN"})
            others = [replace(n, states=states, reason=reason) for n in self.listed[1:]] if self.asked else []
            return [mine, *(others or self.listed[1:])]

    cluster = Down(5, 0, "")
    with pytest.raises(drains.TooMany):
        drains.drain_node(cluster, "n1", BAD, 2)
    assert cluster.asked == ["n1"]


def test_no_more_nodes_drain_themselves_than_the_limit_allows() -> None:
    """A line of [health] that is wrong is wrong on every node."""
    for nodes, drained, reason, allowed in (
        (20, 2, "unicron[health]: x", True),
        (20, 3, "unicron[health]: x", False),
        (20, 9, "fan", True),
        (50, 4, "unicron[health]: x", True),
        (50, 5, "unicron[health]: x", False),
    ):
        cluster = Cluster(nodes, drained, reason)
        if allowed:
            assert "is drained" in drains.drain_node(cluster, "n1", BAD, most=3)
        else:
            with pytest.raises(drains.TooMany, match=rf"\b{drained} nodes? (is|are) drained"):
                drains.drain_node(cluster, "n1", BAD, most=3)
        assert cluster.asked == ["n1"] * allowed


# ---------------------------------------------------------------- docs/drains.md
PRODUCT = ("unicron_ctl", "detector", "unicron", "slurm_plugin", "packaging", "sbatch_templates")


def sources() -> dict[str, str]:
    """The product's texts, but those of the ranks, by their name in the documents: `unicron_ctl/nodes/admission.py`."""
    found = {}
    for path in [path for folder in PRODUCT for path in (ROOT / folder).rglob("*") if path.is_file()]:
        with contextlib.suppress(UnicodeDecodeError):
            found[path.relative_to(ROOT).as_posix().removeprefix("unicron_ctl/unicron_ctl/")] = path.read_text()
    return found


SOURCES = sources()


def where(pattern: str) -> set[str]:
    return {name for name, text in SOURCES.items() if re.search(pattern, text)}


def rows() -> list[list[str]]:
    """The cells of the page's table."""
    table = (ROOT / "docs" / "drains.md").read_text().split("| who |", 1)[1].split("\n\n", 1)[0]
    return [line.strip("|").split("|") for line in table.splitlines()[2:]]


def callers(of: str) -> set[tuple[str, str]]:
    """(file, function) of whoever calls this function of drains.py. Nobody may import it under another name."""
    assert not where(r"slurm\.drains import .*\b(drain_node|drain_reason)\b")
    found = set()
    for file in where(rf"\bdrains\.{of}\("):
        for outer in ast.parse(SOURCES[file]).body:
            if f"drains.{of}(" in ast.unparse(outer):
                found.add((f"unicron_ctl/{file}", getattr(outer, "name", "")))
    return found


def test_the_page_names_whoever_decides_on_a_drain_and_whoever_carries_it_out() -> None:
    said = [re.findall(r"`([\w/]+\.py)`((?:,? `\w+`)+)", row[-1]) for row in rows()]
    named = {(file, function) for row in said for file, names in row for function in re.findall(r"\w+", names)}
    named = {(file, function) for file, function in named if not is_gone(file)}
    assert len(said) == 5 and named == callers("drain_reason") | callers("drain_node")
    starts = {script for row in rows() for script in re.findall(r"`(slurm_plugin/[\w./-]+)`", row[1])}
    assert starts == where(r"unicron_ctl\.nodes\.admission.* --at"), "scripts that run the program which drains"


def test_nothing_drains_a_node_but_the_one_function() -> None:
    """Neither by the client's call nor by a command or an action of its own."""
    clients = {"shared/slurm/command_line.py", "shared/slurm/pyslurm_backend.py"}
    assert where(r"(?<!\bdrains)\.drain\(") == {"shared/slurm/drains.py"}
    assert where(r"""(?i)\bstate=["']?drain\b(?!.*Reason=\.\.\.)""") == clients
    assert where(r"""Action\(\s*["']drain["']""") == {"controller/nodes/isolation.py"}


def test_scripts_and_documents_know_the_reasons_and_the_limit_that_the_code_has() -> None:
    documents = {path.name: path.read_text() for path in (ROOT / "docs").rglob("*.md")}
    for name, text in (SOURCES | documents).items():
        for leader in re.findall(r"unicron\[\w+\]", text):
            assert leader in (drains.HEALTH, drains.LOST_NODE), name
        for most in re.findall(r"^UNICRON_HEALTH_MOST_DRAINED=(\d+)", text, re.MULTILINE):
            assert int(most) == drains.MOST_DRAINED, name
