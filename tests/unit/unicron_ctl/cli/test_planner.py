"""`unicronctl plan` and `unicronctl simulate`: the contract's JSON, and one line and exit status 2 for wrong use."""

from __future__ import annotations

import json
import sys
import types

import pytest

from unicron_ctl.cli.unicronctl import unicronctl
from unicron_ctl.shared.system.program import run
from unicron_planner.simulate.cases import case

SACCT = "JobID|User|JobName|State|ExitCode|Submit|Start|End|NNodes"
SCENARIO = """
[cluster]
nodes = 16
[[job]]
name = "gpt-7b"
min_nodes = 2
nodes = 4
node_names = ["n1", "n2", "n3", "n4"]
flops = { 2 = 1.0e15, 4 = 1.9e15 }
[[job]]
name = "gpt-13b"
nodes = 8
flops = { 4 = 1.9e15, 8 = 3.6e15, 12 = 5e15 }
"""
TRACE = "seconds,event,node,cause\n3600,fail,n0,ecc_error\n90000,join,n0,\n100000,fail,n1,nccl_timeout\n"


@pytest.fixture
def files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "s.toml").write_text(SCENARIO, encoding="utf-8")
    (tmp_path / "t.csv").write_text(TRACE, encoding="utf-8")
    return tmp_path


def call(capsys, *arguments):
    status = run("unicronctl", unicronctl, list(arguments))
    out = capsys.readouterr()
    return status, out.out, out.err


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


def test_simulate_prints_the_contract(files, capsys):
    status, out, err = call(
        capsys, "simulate", "--trace", "t.csv", "--policy", "unicron", "--policy", "megatron", "--json"
    )
    results = json.loads(out)
    assert (status, err) == (0, "") and [result["policy"] for result in results] == ["unicron", "megatron"]
    for result in results:
        assert set(result["lost"]) == {"detection", "transition", "sub_healthy", "recompute"}
        assert result["efficiency"] + sum(result["lost"].values()) == pytest.approx(1)
        assert result["mean_waf"] == pytest.approx(result["efficiency"] * result["ideal_waf"])
    assert results[0]["efficiency"] > results[1]["efficiency"]
    status, out, _ = call(capsys, "simulate", "--trace", "t.csv", "--scenario", "s.toml", "--sources")
    assert status == 0 and "unicron" in out and "[R]" in out


def test_simulate_shows_each_policy_beside_the_bound(capsys):
    words = ("simulate", "--generate", "trace-a", "--days", "56", "--nodes", "12")
    status, out, _ = call(capsys, *words, "--policy", "unicron", "--policy", "clairvoyant")
    assert status == 0
    header, ours, bound = out.splitlines()[:3]
    assert header.endswith("BOUND")
    assert 99.0 < float(ours.split()[-1].rstrip("%")) < 100.0 and bound.split()[-1] == "100.00%"


@pytest.mark.parametrize("words", [(), ("--days", "7"), ("--seed", "0")], ids=" ".join)
def test_trace_b_has_its_own_length(capsys, words):
    assert call(capsys, "simulate", "--generate", "trace-b") == call(
        capsys, "simulate", "--generate", "trace-b", *words
    )


def test_simulate_generates_draws_and_saves(files, capsys):
    status, _, _ = call(
        capsys,
        "simulate",
        "--generate",
        "unicron",
        "--days",
        "30",
        "--seed",
        "2",
        "--figure",
        "a.svg",
        "--html",
        "a.html",
        "--save-trace",
        "again.csv",
    )
    assert status == 0
    assert (files / "a.html").read_text(encoding="utf-8").startswith("<!doctype html>")
    again = ("simulate", "--trace", "again.csv", "--until", str(30 * 86400), "--json")
    first = call(capsys, *again)
    assert first[0] == 0 and first == call(capsys, *again)


def test_simulate_tells_waiting_apart_and_what_a_history_does_not_say(files, capsys):
    rows = [SACCT]
    rows += ["7|ann|gpt|NODE_FAIL|0:0|2026-01-01T00:00:00|2026-01-01T00:00:00|2026-01-01T10:00:00|8"]
    rows += ["7|ann|gpt|COMPLETED|0:0|2026-01-01T10:00:00|2026-01-01T11:00:00|2026-01-01T12:00:00|8"]
    rows += ["8|ann|gpt|REQUEUED|0:0|2026-01-01T00:00:00|2026-01-01T00:00:00|2026-01-01T10:00:00|8"]
    (files / "h.txt").write_text("\n".join(rows))
    status, out, _ = call(capsys, "simulate", "--from-sacct", "h.txt", "--setup-minutes", "0")
    lines = [line.split() for line in out.splitlines()]
    waiting = [line[3] for line in lines if line[:3] == ["of", "it", "waiting"]]
    assert (status, waiting) == (0, ["8.0", "1.0", "7.0"])
    assert "1 that were requeued (why is not told)" in out
    assert "others may have used these meanwhile" in out and "not known: whether a user had to mend a bug" in out


WRONG = [
    ["plan"],
    ["plan", "s.toml", "--live"],
    ["plan", "none.toml"],
    ["plan", "t.csv"],
    ["plan", "."],
    ["plan", "s.toml", "--if", "pigs fly"],
    ["plan", "s.toml", "--explain", "nobody"],
    ["plan", "minima.toml"],
    ["simulate"],
    ["simulate", "--trace", "none.csv"],
    ["simulate", "--trace", "s.toml"],
    ["simulate", "--trace", "t.csv", "--policy", "magic"],
    ["simulate", "--trace", "t.csv", "--scenario", "t.csv"],
    ["simulate", "--trace", "t.csv", "--until", "nan"],
    ["simulate", "--trace", "t.csv", "--scenario", "s.toml", "--nodes", "3"],
    ["simulate", "--trace", "t.csv", "--nodes", "0"],
    ["simulate", "--trace", "t.csv", "--until", "-5"],
    ["simulate", "--trace", "t.csv", "--figure", "a.pdf"],
    ["simulate", "--trace", "t.csv", "--html", "no/such/a.html"],
    ["simulate", "--generate", "nothing"],
    ["simulate", "--generate", "rsc1", "--days", "nan"],
    ["simulate", "--generate", "trace-b", "--days", "1"],
    ["simulate", "--trace", "t.csv", "--generate", "rsc1"],
    ["simulate", "--trace", "t.csv", "--days", "7"],
    ["simulate", "--trace", "t.csv", "--seed", "0"],
    *(
        ["simulate", "--from-sacct", "h.txt", *words.split()]
        for words in ("--until 5", "--nodes 3", "--sources", "--days 7", "--seed 0", "--checkpoint-minutes nan")
    ),
]


@pytest.mark.parametrize("arguments", WRONG, ids=" ".join)
def test_wrong_use_is_one_line_and_status_2(files, capsys, arguments):
    (files / "minima.toml").write_text(SCENARIO.replace("min_nodes = 2", "min_nodes = 16"), encoding="utf-8")
    (files / "h.txt").write_text(f"{SACCT}\n7|ann|gpt|FAILED|1:0|{3 * '2026-01-01T00:00:00|'}8\n", encoding="utf-8")
    status, out, err = call(capsys, *arguments)
    assert (status, out) == (2, "")
    assert err.startswith("unicronctl: ") and err.count("\n") == 1 and "Error" not in err


def test_minima_can_be_overruled(files, capsys):
    (files / "minima.toml").write_text(SCENARIO.replace("min_nodes = 2", "min_nodes = 16"), encoding="utf-8")
    assert call(capsys, "plan", "minima.toml", "--oversubscribed")[0] == 0
