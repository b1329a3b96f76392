"""`unicronctl simulate`: the contract's JSON, and one line and exit status 2 for wrong use."""

from __future__ import annotations

import json

import pytest

from tests.support.plans import SCENARIO, call

SACCT = "JobID|User|JobName|State|ExitCode|Submit|Start|End|NNodes"
TRACE = "seconds,event,node,cause\n3600,fail,n0,ecc_error\n90000,join,n0,\n100000,fail,n1,nccl_timeout\n"


@pytest.fixture
def files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "s.toml").write_text(SCENARIO, encoding="utf-8")
    (tmp_path / "t.csv").write_text(TRACE, encoding="utf-8")
    return tmp_path


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
    words = "--generate unicron --days 30 --seed 2 --figure a.svg --html a.html --save-trace again.csv"
    assert call(capsys, "simulate", *words.split())[0] == 0
    assert (files / "a.html").read_text(encoding="utf-8").startswith("<!doctype html>")
    again = ("simulate", "--trace", "again.csv", "--until", str(30 * 86400), "--json")
    first = call(capsys, *again)
    assert first[0] == 0 and first == call(capsys, *again)


def test_simulate_tells_waiting_apart_and_what_a_history_does_not_say(files, capsys, snapshot):
    rows = [SACCT]
    rows += ["7|ann|gpt|NODE_FAIL|0:0|2026-01-01T00:00:00|2026-01-01T00:00:00|2026-01-01T10:00:00|8"]
    rows += ["7|ann|gpt|COMPLETED|0:0|2026-01-01T10:00:00|2026-01-01T11:00:00|2026-01-01T12:00:00|8"]
    rows += ["8|ann|gpt|REQUEUED|0:0|2026-01-01T00:00:00|2026-01-01T00:00:00|2026-01-01T10:00:00|8"]
    (files / "h.txt").write_text("\n".join(rows))
    status, out, _ = call(capsys, "simulate", "--from-sacct", "h.txt", "--setup-minutes", "0")
    lines = [line.split() for line in out.splitlines()]
    waiting = [line[4] for line in lines if line[:3] == ["of", "it", "in"]]
    assert (status, waiting) == (0, ["8.0", "1.0", "7.0"])
    assert out == snapshot


WRONG = [
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
    (files / "h.txt").write_text(f"{SACCT}\n7|ann|gpt|FAILED|1:0|{3 * '2026-01-01T00:00:00|'}8\n", encoding="utf-8")
    status, out, err = call(capsys, *arguments)
    assert (status, out) == (2, "")
    assert err.startswith("unicronctl: ") and err.count("\n") == 1 and "Error" not in err
