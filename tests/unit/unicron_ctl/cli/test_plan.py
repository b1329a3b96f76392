"""`unicronctl plan`: the contract's JSON, and one line and exit status 2 for wrong use."""

from __future__ import annotations

import json
import sys
import types

import pytest

from tests.support.plans import SCENARIO, call
from unicron_planner.simulate.cases import case

MINIMA = SCENARIO.replace("min_nodes = 2", "min_nodes = 16")


@pytest.fixture
def files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "s.toml").write_text(SCENARIO, encoding="utf-8")
    (tmp_path / "minima.toml").write_text(MINIMA, encoding="utf-8")
    (tmp_path / "t.csv").write_text("seconds,event,node,cause\n3600,fail,n0,ecc_error\n", encoding="utf-8")
    return tmp_path


def test_plan_prints_the_contract(files, capsys):
    status, out, err = call(capsys, "plan", "s.toml", "--json")
    plan = json.loads(out)
    assert (status, err) == (0, "")
    assert plan["assignment"] == {"gpt-7b": 4, "gpt-13b": 12}
    assert plan["waf"] == 6.9e15 and plan["objective"] == pytest.approx(6.9e15 * 225000 - 3.6e15 * 60)
    assert set(plan["reasons"]) == {"gpt-7b", "gpt-13b"}
    status, out, _ = call(capsys, "plan", "s.toml", "--if", "node n3 fails", "--explain", "gpt-7b", "--ahead")
    assert status == 0 and "second-best" in out and "if lost gpt-7b" in out and "15 nodes" in out


def answer(scenario):
    """The controller's answer for such a cluster."""
    jobs = [
        {
            "name": job.name,
            "weight": job.weight,
            "nodes": job.nodes,
            "min_nodes": job.min_nodes,
            "flops": {str(size): rate for size, rate in job.flops.items()},
        }
        for job in scenario.jobs
    ]
    return {"cluster": {"nodes": scenario.nodes, "mtbf_node_hours": scenario.mtbf_node_hours}, "job": jobs}


def test_plan_live_asks_the_controller(files, capsys, monkeypatch):
    asked = []
    module = types.ModuleType("unicron_ctl.shared.protocol.client")

    def ask(question, controller):
        asked.append((question["kind"], controller))
        return answer(case(2)) if question["kind"] == "scenario" else [{"job": "task6-13b", "name": "gpt"}]

    module.ask_controller = ask
    monkeypatch.setitem(sys.modules, "unicron_ctl.shared.protocol.client", module)
    where = ("--controller", "tcp://head:1")
    for name in ("task6-13b", "gpt"):
        status, out, _ = call(capsys, "plan", "--live", "--if", f"job {name} finishes", "--json", *where)
        assert status == 0 and len(json.loads(out)["assignment"]) == 5
    assert set(asked) == {("scenario", "tcp://head:1"), ("jobs", "tcp://head:1")}


WRONG = [
    ["plan"],
    ["plan", "s.toml", "--live"],
    ["plan", "none.toml"],
    ["plan", "t.csv"],
    ["plan", "."],
    ["plan", "s.toml", "--if", "pigs fly"],
    ["plan", "s.toml", "--explain", "nobody"],
    ["plan", "minima.toml"],
]


@pytest.mark.parametrize("arguments", WRONG, ids=" ".join)
def test_wrong_use_is_one_line_and_status_2(files, capsys, arguments):
    status, out, err = call(capsys, *arguments)
    assert (status, out) == (2, "")
    assert err.startswith("unicronctl: ") and err.count("\n") == 1 and "Error" not in err


def test_minima_can_be_overruled(files, capsys):
    status, out, _ = call(capsys, "plan", "minima.toml", "--oversubscribed", "--json")
    assert status == 0 and 0 < sum(json.loads(out)["assignment"].values()) <= 16
