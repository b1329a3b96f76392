"""`unicronctl inject` and `punish`: what they ask, refuse and do themselves."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

from unicron_ctl.cli.unicronctl import commands as all_commands
from unicron_ctl.lab.commands import inject as commands
from unicron_ctl.shared.system.program import run


def clock(now: list[float]) -> SimpleNamespace:
    """For one module alone: other threads of this process sleep, too."""
    return SimpleNamespace(monotonic=lambda: now[0], sleep=lambda seconds: now.__setitem__(0, now[0] + seconds))


def test_the_commands_refuse_nonsense_before_they_ask(capsys):
    assert {"inject", "punish"} <= set(all_commands())
    assert run("unicronctl", commands.command, ["slow:x", "--job", "1"]) == 2
    assert run("unicronctl", commands.punish, ["--mtbf", "5", "--minutes", "1", "--faults", "typo"]) == 2
    assert run("unicronctl", commands.punish, ["--mtbf", "5", "--minutes", "1", "--faults", " "]) == 2
    assert capsys.readouterr().err.count("\n") == 3
    assert "exception:CLASS" in CliRunner().invoke(commands.command, ["--help"]).output


def test_punish_is_reproducible_and_ends_when_the_time_is_up(monkeypatch):
    runs = []
    for _ in range(2):
        now, asked = [0.0], []
        monkeypatch.setattr(commands, "time", clock(now))

        def answer(question, _controller, asked=asked, now=now):
            if question["kind"] == "jobs":
                return [{"job": "1", "name": "gpt", "ended": None, "members": [0, 1] if now[0] > 20 else []}]
            asked.append((round(now[0], 3), question["fault"], question["slot"]))
            chosen = {"slot": question["slot"] or 0, "node": "n", "seconds": 0.0, "dry_run": False, "at": 0.0}
            return {**question, **chosen}

        monkeypatch.setattr(commands, "ask_controller", answer)
        done = CliRunner().invoke(commands.punish, ["--mtbf", "5", "--minutes", "2", "--seed", "7"])
        assert done.exit_code == 0
        faults, minutes, seed, *_ = re.findall(r"\d+", done.output.splitlines()[-1])
        assert (faults, minutes, seed) == (str(len(asked)), "2", "7")
        assert now[0] == pytest.approx(120.0)
        runs.append(asked)
    assert runs[0] == runs[1] and 10 <= len(runs[0]) <= 40
    assert len({fault for _, fault, _ in runs[0]}) > 2


class Controller:
    """What the commands ask, answered."""

    def __init__(self, nodes=("n1", "n2")):
        self.asked, self.nodes = [], nodes

    def __call__(self, question, _address=None):
        self.asked.append(question)
        if question["kind"] == "jobs":
            elements = [{"node": node, "gone": ""} for node in self.nodes]
            return [{"job": "1", "name": "gpt", "ended": None, "members": [0, 1], "elements": elements}]
        if question["kind"] == "events":
            return [{"kind": "inject_refused", "slot": 0, "reason": "oom-kill was not injected: it takes root"}]
        done = {"slot": 0, "node": "n1", "dry_run": False, "seconds": 20.0, "event": 5, "job": "1", "at": 0.0}
        return done | {key: value for key, value in question.items() if key != "kind" and value is not None}


def test_a_refused_fault_is_one_line(monkeypatch, capsys):
    monkeypatch.setattr(commands, "ask_controller", Controller())
    assert run("unicronctl", commands.command, ["oom-kill", "--job", "1"]) == 1
    assert "it takes root" in capsys.readouterr().err


def test_a_node_elsewhere_is_for_its_admin_and_nothing_is_logged(monkeypatch, capsys, tmp_path, snapshot):
    asked = Controller()
    monkeypatch.setattr(commands, "ask_controller", asked)
    assert run("unicronctl", commands.command, ["lost-node", "--node", "n1", "--state-dir", str(tmp_path)]) == 1
    assert "ipmitool -H n1-bmc chassis power off" in capsys.readouterr().err
    assert [question["dry_run"] for question in asked.asked if question["kind"] == "inject"] == [True]
    monkeypatch.setattr(commands, "ask_controller", Controller(nodes=()))
    assert run("unicronctl", commands.command, ["lost-node", "--node", "n9"]) == 2
    assert capsys.readouterr().err == snapshot


def test_a_lost_node_of_the_local_cluster_is_powered_off_and_on_again(monkeypatch, tmp_path):
    calls, now = [], [0.0]

    class Local:
        spec = type("Spec", (), {"node_names": ["n1", "n2"]})

        @classmethod
        def load(cls, _folder):
            return cls()

        def power_off(self, node):
            calls.append(("off", node, now[0]))

        def power_on(self, node):
            calls.append(("on", node, now[0]))

    monkeypatch.setattr(commands, "LocalCluster", Local)
    monkeypatch.setattr(commands, "ask_controller", Controller())
    monkeypatch.setattr(commands, "time", clock(now))
    assert CliRunner().invoke(commands.command, ["lost-node", "--node", "n1"]).exit_code == 0
    assert calls == [("off", "n1", 0.0)]
    calls.clear()
    words = ["--mtbf", "20", "--minutes", "3", "--faults", "lost-node"]
    assert CliRunner().invoke(commands.punish, words).exit_code == 0
    kinds = [kind for kind, _, _ in calls]
    assert kinds.count("off") >= 3 and kinds[-1] == "on" and now[0] == pytest.approx(180.0)
