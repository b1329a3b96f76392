"""Paired tests: who is paired with whom, what is run, and what an srun's output says."""

from __future__ import annotations

import dataclasses
import json

import msgspec
import pytest
from syrupy.assertion import SnapshotAssertion

from unicron_ctl.shared.slurm import drains, pairs, steps
from unicron_ctl.shared.slurm.slurm_client import NodeInfo
from unicron_ctl.shared.system.errors import UserError
from unicron_ctl.tools import pair_test
from unicron_ctl.tools.pair_test import report_of
from unicron_detector.health.pair_probe import MARK, add_numbers, numbers, ports
from unicron_detector.health.pair_test import Outcome


def cluster(count: int = 6, **states: set[str]) -> list[NodeInfo]:
    names = [f"n{i}" for i in range(1, count + 1)]
    return [NodeInfo(n, frozenset(states.get(n, {"IDLE"})), "", f"ip-{n}", 1, 0.0, 4) for n in names]


# ---------------------------------------------------------------- choosing
def test_all_idle_nodes_are_tested_when_none_is_named() -> None:
    nodes = cluster(n2={"ALLOCATED"}, n3={"IDLE", "DRAIN"}, n4={"DOWN"})
    assert pairs.choose(nodes, []) == (["n1", "n5", "n6"], [], {})


def test_a_single_suspect_gets_helpers_that_also_meet_each_other() -> None:
    tested, helpers, left = pairs.choose(cluster(), ["n3"])
    assert (tested, helpers, left) == (["n3"], ["n1", "n2", "n4", "n5", "n6"], {})
    assert pairs.pairs(tested, helpers) == [("n3", "n1"), ("n2", "n4"), ("n5", "n6")]


def test_only_nodes_that_are_named_are_used() -> None:
    """Defect: idle nodes that nobody had named were tested beside two that were."""
    assert pairs.choose(cluster(8), ["n1", "n2"]) == (["n1", "n2"], [], {})
    tested, helpers, left = pairs.choose(cluster(8, n2={"ALLOCATED"}), ["n1", "n2"])
    assert (tested, helpers) == ([], []) and "no partner" in left["n1"] and "try again" in left["n2"]
    assert pairs.choose(cluster(1), [])[2] == pairs.choose(cluster(1), ["n1"])[2] == {"n1": left["n1"]}


def test_each_of_several_suspects_meets_a_helper_as_far_as_there_are_some() -> None:
    tested, helpers, _ = pairs.choose(cluster(8), ["n1", "n2"], with_others=True)
    assert pairs.pairs(tested, helpers) == [("n1", "n3"), ("n2", "n4"), ("n5", "n6")]
    assert pairs.pairs(["a", "b", "c"], ["x"]) == [("a", "b"), ("c", "x")]


def test_nodes_that_cannot_be_tested_are_named_with_what_to_do() -> None:
    nodes = cluster(n2={"ALLOCATED"}, n3={"IDLE", "DRAIN"})
    tested, _, left = pairs.choose(nodes, ["n1", "n2", "n3"], with_others=True)
    assert tested == ["n1"] and "try again" in left["n2"] and "State=RESUME" in left["n3"]


def test_a_node_that_unicron_took_is_given_back_by_unicron(snapshot: SnapshotAssertion) -> None:
    """Defect: doctor advised to resume it, whatever it was taken for."""
    (taken,) = cluster(1, n1={"DOWN"})
    taken = dataclasses.replace(taken, reason="unicron[node_problem]: agent silent")
    said = steps.why_not_idle(taken)
    assert "RESUME" not in said
    assert [said, pairs.choose([taken], ["n1"])[2]["n1"]] == snapshot


def test_a_node_that_a_pair_test_took_is_given_back_by_an_admin() -> None:
    """Nobody else does: a node that is drained is not tested again."""
    (taken,) = cluster(1, n1={"IDLE", "DRAIN"})
    taken = dataclasses.replace(taken, reason=drains.drain_reason(drains.HEALTH, "pair test failed with n2 and n3"))
    said = pairs.choose([taken], ["n1"])[2]["n1"]
    assert said == steps.why_not_idle(taken) and said.count("State=RESUME") == 1 and "gives it back" not in said


@pytest.mark.parametrize(("wanted", "words"), [(["n77"], "knows no node 'n77'"), (["n1", "n1"], "named twice")])
def test_wrong_names_are_wrong_use(wanted: list[str], words: str) -> None:
    with pytest.raises(UserError, match=words) as caught:
        pairs.choose(cluster(), wanted)
    assert caught.value.exit_code == 2


# ---------------------------------------------------------------- running
def test_the_command_asks_for_exactly_the_two_nodes_and_all_their_gpus() -> None:
    nodes = {node.name: node for node in cluster()}
    nodes["n2"] = dataclasses.replace(nodes["n2"], gpus=2)
    wish = pairs.Wish(partition="debug", python="/opt/python")
    line = pairs.command(("n2", "n1"), nodes, wish, "abc")
    for word in ("--nodelist=n2,n1", "--nodes=2", "--gres=gpu:2", "--partition=debug", "--address=ip-n2"):
        assert word in line
    assert line.index("/opt/python") < line.index("-P") < line.index("unicron_detector.health.pair_probe")
    assert not any("gres" in word for word in pairs.command(("n1", "n2"), nodes, pairs.Wish(gpus=False), "abc"))


# ---------------------------------------------------------------- reading
GROUP = ("n1", "n2")


def said(*items: dict) -> str:
    return "srun says\n" + "".join(f"{MARK}{json.dumps(item)}\n" for item in items) + f"{MARK}{{broken\n"


def ok(node: str, **more) -> dict:
    return {"node": node, "ok": True, "error": "", "backend": "gloo", "bandwidth": 2e9, "latency": 1e-5, **more}


STARTED = [{"node": "n1", "started": True}, {"node": "n2", "started": True}]


def test_a_passed_test() -> None:
    test = pairs.read(1, GROUP, said(*STARTED, ok("n2", bandwidth=None), ok("n1")), "", 0, False)
    assert test.outcome == Outcome(True, 0.5) and (test.bandwidth, test.backend) == (2e9, "gloo")


@pytest.mark.parametrize(
    ("out", "err", "status", "late"),
    [
        (said(*STARTED, ok("n1"), {"node": "n2", "ok": False, "error": "wrong sum"}), "", 1, False),
        (said(*STARTED, ok("n1")), "srun: error: n2: Killed", 137, False),
        (said(*STARTED), "", 0, True),
        (said(STARTED[0]), "srun: error: Task launch failed", 1, False),
        ("", "execve(): /opt/python: No such file or directory", 2, False),
        ("", "", 1, False),
    ],
    ids=["a-nodes-own-error", "killed", "late", "not-started", "no-python", "silent"],
)
def test_a_failed_test(out: str, err: str, status: int, late: bool, snapshot: SnapshotAssertion) -> None:
    test = pairs.read(1, GROUP, out, err, status, late)
    assert test.outcome == Outcome(False) and test.reason == snapshot


def test_what_went_wrong_itself_comes_before_a_peer_that_vanished() -> None:
    gone = {"node": "n1", "ok": False, "error": "n2 closed the connection"}
    test = pairs.read(1, GROUP, said(*STARTED, gone, {"node": "n2", "ok": False, "error": "wrong sum"}), "", 1, False)
    assert test.reason.startswith("n2: wrong sum")


def test_a_test_that_slurm_did_not_start_says_nothing_of_the_nodes() -> None:
    test = pairs.read(1, GROUP, "", "srun: error: Unable to allocate resources: Requested nodes are busy\n", 1, False)
    assert test.outcome is None and "busy" in test.reason


class Scripted(pairs.Runner):
    """Tests come out as `bad` says, without Slurm."""

    bad: frozenset[str] = frozenset()
    busy: frozenset[str] = frozenset()

    def wave(self, number, groups):
        return [self._result(number, group) for group in groups]

    def _result(self, number, group):
        if self.busy & set(group):
            return pairs.PairTest(number, group, None, "busy")
        wrong = self.bad & set(group)
        return pairs.PairTest(number, group, not wrong, "wrong sum") if wrong else pairs.PairTest(number, group, True)


def play(tested, helpers, bad=(), busy=()) -> pairs.Findings:
    runner = Scripted(cluster(8), pairs.Wish(), {}, lambda text: None)
    runner.bad, runner.busy = frozenset(bad), frozenset(busy)
    return runner.play(tested, helpers)


def test_a_bad_suspect_is_proven_bad_beside_a_witness_that_round_1_proved() -> None:
    found = play(["n3"], ["n1", "n2", "n4"], bad=["n3"])
    assert list(found.judgement.bad) == ["n3"] and "wrong sum" in found.why_bad("n3")
    assert found.judgement.good == ("n1", "n2", "n4")
    msgspec.json.encode(report_of(found, {}))


def test_people_are_told_who_is_bad_and_what_to_do(capsys, snapshot: SnapshotAssertion) -> None:
    pair_test._print(play(["n1", "n2", "n3"], ["n4"], bad=["n3"]), {}, "no controller answers")
    said = capsys.readouterr()
    assert [said.out, said.err] == snapshot


def test_a_bad_helper_does_not_condemn_the_suspect() -> None:
    found = play(["n3"], ["n1", "n2", "n4"], bad=["n1"])
    assert list(found.judgement.bad) == ["n1"] and "n3" in found.judgement.good


def test_without_a_witness_nobody_is_called_bad() -> None:
    found = play(["n3"], ["n1"], bad=["n3"])
    assert not found.judgement.bad and set(found.judgement.unknown) == {"n1", "n3"}


def test_nodes_that_got_no_test_are_named(snapshot: SnapshotAssertion) -> None:
    found = play(["n1", "n2", "n3", "n4"], [], busy=["n2"])
    assert found.left_out == {"n1": "busy", "n2": "busy"} and found.judgement.good == ("n3", "n4")
    assert play(["n1"], []).left_out == snapshot


# ---------------------------------------------------------------- the probe's arithmetic
def test_numbers_add_up_one_by_one() -> None:
    import struct

    parts = [numbers(seed, 1000) for seed in range(5)]
    read = [struct.unpack("<1000I", part) for part in parts]
    assert struct.unpack("<1000I", add_numbers(parts)) == tuple(map(sum, zip(*read, strict=True)))
    assert max(map(max, read)) < 1 << 16 and numbers(1) != numbers(2)


def test_ports_differ_by_token_and_are_allowed() -> None:
    assert all(1024 < port < 32768 for token in map(str, range(500)) for port in ports(token))
    assert len({ports(str(token))[0] for token in range(500)}) > 400
