"""The admission program's decisions: who is drained, and what is reported."""

from __future__ import annotations

import contextlib
from dataclasses import replace

import msgspec
import pytest

from tests.support.clock import START
from unicron_ctl.controller.model.requests import OURS
from unicron_ctl.controller.nodes.readmission import Report
from unicron_ctl.nodes import admission
from unicron_ctl.shared.slurm.slurm_client import NodeInfo
from unicron_ctl.shared.system.errors import UserError
from unicron_detector.health.checks import Settings


def info(*states: str, reason: str = "") -> NodeInfo:
    return NodeInfo("n1", frozenset(states), reason, "127.0.0.1", 1, START, 0)


@pytest.mark.parametrize("states", [["IDLE"], ["ALLOCATED"], ["MIXED"]])
def test_a_node_in_service_is_drained_with_our_leader(states: list[str]) -> None:
    assert admission.drain_text(info(*states), "gpu:\n 7 of  8") == ("unicron[health]: gpu: 7 of 8", "")


def test_the_leader_is_the_one_that_the_controller_takes_for_ours() -> None:
    assert admission.LEADER.startswith(f"{OURS}[")


def test_a_node_that_slurm_itself_set_down_is_drained() -> None:
    for reason in ("", "Not responding", "Node unexpectedly rebooted"):
        assert admission.drain_text(info("DOWN", reason=reason), "x") == ("unicron[health]: x", "")


@pytest.mark.parametrize(
    ("node", "words"),
    [
        (info("IDLE", "DRAIN", reason="NHC: fan"), "drained already (NHC: fan)"),
        (info("IDLE", "DRAIN", reason="unicron[health]: old"), "drained already (unicron[health]: old)"),
        (info("DOWN", reason="bad board, ticket 7"), "down already (bad board, ticket 7)"),
        (info("DOWN", reason="unicron[node_problem]: lost"), "down already"),
        (None, "does not know"),
    ],
)
def test_a_node_that_is_out_of_service_is_left_as_it_is(node: NodeInfo | None, words: str) -> None:
    reason, why = admission.drain_text(node, "x")
    assert reason == "" and words in why


def test_another_tools_note_on_a_node_in_service_is_kept() -> None:
    assert admission.drain_text(info("IDLE", reason="do not use after 6"), "x")[0] == (
        "do not use after 6; unicron[health]: x"
    )


def state(tmp_path) -> list[str]:
    return ["--state", str(tmp_path / "state")]


def run(tmp_path, *words: str, config: str = "") -> tuple[int, str]:
    file, log = tmp_path / "unicron.toml", tmp_path / "log"
    file.write_text(config)
    log.unlink(missing_ok=True)
    usual = ["--config", str(file), "--log", str(log), "--node", "n1", "--drain", "off", *state(tmp_path)]
    status = admission.main([*usual, *words])
    return status, log.read_text() if log.exists() else ""


def test_only_proof_gives_the_status_that_drains(tmp_path) -> None:
    assert run(tmp_path, "--skip", "clock") == (0, "")
    status, log = run(tmp_path, config="[health]\nmemory_mb = 999999999\n")
    assert status == admission.PROVEN_BAD == 100 and "proven bad: memory:" in log and "node n1" in log
    assert run(tmp_path, "--skip", "memory", config="[health]\nmemory_mb = 999999999\n") == (0, "")
    off = run(tmp_path, config='[health]\nmemory_mb = 999999999\nskip = ["all"]\n')
    assert off == (0, "")


def test_mistakes_in_the_configuration_are_said_and_drain_nobody(tmp_path) -> None:
    status, log = run(tmp_path, config="[health]\nmemory = 1\n")
    assert status == 0 and "[health] memory: unknown key; did you mean memory_mb?" in log
    status, log = run(tmp_path, "--skip", "fans")
    assert status == 0 and 'skip = "fans": use some of gpu, memory' in log
    missing = ["--config", str(tmp_path / "none"), "--log", str(tmp_path / "log2"), *state(tmp_path)]
    assert admission.main(missing) == 0
    assert "No such file or directory" in (tmp_path / "log2").read_text()


def test_a_mistake_leaves_the_other_lines_in_force_and_the_controller_is_told(tmp_path, monkeypatch) -> None:
    """Defect: a mistyped key switched all checks of what a node must have off, on all nodes."""
    told: list[dict] = []
    monkeypatch.setattr(admission, "ask_controller", lambda question, where, timeout: told.append(question))
    run(tmp_path, "--controller", "tcp://h:1", config="[health]\ngpus = 99\nnicz = ['ib0']\n")
    assert told[0]["verdict"] == "bad" and "99 GPUs expected" in told[0]["reason"]
    run(tmp_path, "--controller", "tcp://h:1", "--skip", "clock", config="[health]\nnicz = ['ib0']\n")
    assert (
        told[1]["verdict"] == "warning"
        and "unicron.toml: [health] nicz: unknown key; did you mean nics?" in told[1]["reason"]
    )


def test_a_controller_that_does_not_answer_is_only_said(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(admission, "REPORT_SECONDS", 0.2)
    status, log = run(tmp_path, "--skip", "clock", "--controller", "tcp://127.0.0.1:1")
    assert status == 0 and "the controller was not told" in log


def test_the_report_says_what_was_found(tmp_path, monkeypatch) -> None:
    told: list[dict] = []
    monkeypatch.setattr(admission, "ask_controller", lambda question, where, timeout: told.append(question))
    run(tmp_path, "--controller", "tcp://h:1", "--at", "prolog", config="[health]\ngpus = 99\n")
    assert [(t["kind"], t["node"], t["source"], t["verdict"]) for t in told] == [("health", "n1", "prolog", "bad")]
    assert "99 GPUs expected" in told[0]["reason"] and msgspec.convert(told[0], Report)


def test_a_report_that_cannot_be_sent_is_one_line() -> None:
    with pytest.raises(UserError, match="not the address of a controller"):
        admission.report("nonsense", "n1", "interval", admission.run(Settings(skip=("all",))), 0.0)


def test_reports_go_to_the_address_of_the_configuration(tmp_path, monkeypatch) -> None:
    monkeypatch.delenv("UNICRON_CONTROLLER", raising=False)
    told = []
    monkeypatch.setattr(admission, "ask_controller", lambda question, where, timeout: told.append(where))
    skip = '[health]\nskip = ["all"]\n'
    assert run(tmp_path, config=skip)[0] == 0 and told == []
    assert run(tmp_path, config=f'{skip}[controller]\naddress = "tcp://head:7451"\n')[0] == 0
    assert told == ["tcp://head:7451"]
    assert run(tmp_path, "--controller", "tcp://other:1", config=skip)[0] == 0 and told[1:] == ["tcp://other:1"]
    _, said = run(tmp_path, config=f'{skip}[controller]\naddress = "head"\n')
    assert "write tcp://HOST:PORT" in said


def test_the_usual_configuration_is_read_where_none_is_named(tmp_path, monkeypatch) -> None:
    monkeypatch.delenv("UNICRON_CONFIG", raising=False)
    monkeypatch.setattr(admission, "USUAL_CONFIG", str(tmp_path / "unicron.toml"))
    assert admission._usual_config() is None
    (tmp_path / "unicron.toml").touch()
    assert admission._usual_config() == str(tmp_path / "unicron.toml")
    monkeypatch.setenv("UNICRON_CONFIG", "/nonexistent")
    assert admission._usual_config() is None


class Cluster:
    """A Slurm whose other nodes are drained."""

    def __init__(self, nodes: int, drained: int, reason: str) -> None:
        names = [f"n{number}" for number in range(1, nodes + 1)]
        self.asked: list[str] = []
        self.listed = [
            NodeInfo(name, frozenset({"IDLE", "DRAIN"} if 1 <= i <= drained else {"IDLE"}), reason, "h", 1, START, 0)
            for i, name in enumerate(names)
        ]

    def nodes(self) -> list[NodeInfo]:
        return self.listed

    def drain(self, node: str, reason: str) -> None:
        self.asked.append(node)


def test_nodes_that_drain_at_the_same_moment_are_no_more_than_the_limit_either() -> None:
    """The prologs of a large job run at once, and all see that nobody is drained."""

    class Together(Cluster):
        def nodes(self) -> list[NodeInfo]:
            drained = [f"n{number}" for number in range(1, 6)] if self.asked else []
            reason, states = "unicron[health]: memory", frozenset({"IDLE", "DRAIN"})
            return [replace(n, states=states, reason=reason) if n.name in drained else n for n in self.listed]

        def resume(self, node: str) -> None:
            self.asked.append(f"not {node}")

    for most, done in ((4, ["n1", "not n1"]), (5, ["n1"])):
        cluster = Together(20, 0, "")
        with pytest.raises(admission.TooMany) if len(done) > 1 else contextlib.nullcontext():
            admission.drain(cluster, "n1", "memory", most)
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
    with pytest.raises(admission.TooMany):
        admission.drain(cluster, "n1", "memory", 2)
    assert cluster.asked == ["n1"]


def test_a_node_that_slurm_has_down_stays_down_where_there_are_too_many() -> None:
    """Nobody takes it: no more is taken by its drain, and a resume would give it back."""

    class Down(Cluster):
        def nodes(self) -> list[NodeInfo]:
            mine = replace(self.listed[0], states=frozenset({"DOWN"}), reason="Low RealMemory")
            reason, states = "unicron[health]: memory", frozenset({"IDLE", "DRAIN"})
            others = [replace(n, states=states, reason=reason) for n in self.listed[1:]] if self.asked else []
            return [mine, *(others or self.listed[1:])]

    cluster = Down(5, 0, "")
    with pytest.raises(admission.TooMany):
        admission.drain(cluster, "n1", "memory", 2)
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
            assert "is drained" in admission.drain(cluster, "n1", "memory", most=3)
        else:
            with pytest.raises(admission.TooMany, match=f"{drained} nodes? (is|are) drained by checks"):
                admission.drain(cluster, "n1", "memory", most=3)
        assert cluster.asked == ["n1"] * allowed
