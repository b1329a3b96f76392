"""What a site's failures have cost, from the history that real accounting has of a real cluster."""

from __future__ import annotations

import datetime
import os
import pwd
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.processes import wait_for
from unicron_ctl.lab.cluster import LocalCluster
from unicron_planner.simulate import trace
from unicron_planner.simulate.history import COMMAND, Costs, judge, load

pytestmark = pytest.mark.slurm


@pytest.fixture
def accounted(tmp_path: Path) -> Iterator[LocalCluster]:
    """Three nodes, and slurmdbd."""
    cluster = LocalCluster(tmp_path / "state", nodes=3, gpus_per_node=0, with_accounting=True)
    try:
        cluster.up()
        yield cluster
    finally:
        cluster.down()


def slurm(cluster: LocalCluster, *words: str) -> str:
    environment = {**os.environ, **cluster.env()}
    return subprocess.run(words, env=environment, check=True, capture_output=True, text=True, timeout=30).stdout


def history(cluster: LocalCluster) -> list[dict[str, str]]:
    text = slurm(cluster, *COMMAND.replace("START", "now-1days").split())
    header, *rows = [line.split("|") for line in text.splitlines()]
    return [dict(zip(header, row, strict=True)) for row in rows]


def submit(cluster: LocalCluster, script: Path, text: str, *options: str) -> str:
    script.write_text(f"#!/bin/sh\n{text}\n")
    return slurm(cluster, "sbatch", "--parsable", "-o", "/dev/null", *options, str(script)).strip()


def seconds(text: str) -> float:
    return datetime.datetime.fromisoformat(text).timestamp()


def earlier(text: str) -> str:
    return (datetime.datetime.fromisoformat(text) - datetime.timedelta(minutes=15)).isoformat()


def test_accounts_events_and_runs_are_read_as_they_are_printed(accounted: LocalCluster, tmp_path: Path) -> None:
    user = pwd.getpwuid(os.getuid()).pw_name
    slurm(accounted, "sacctmgr", "-i", "add", "account", "lab", "Description=x", "Organization=x")
    before = accounted.client().admin_level(user)
    slurm(accounted, "sacctmgr", "-i", "add", "user", user, "Account=lab", "AdminLevel=Operator")
    assert (before, accounted.client().admin_level(user)) in [("", "Operator"), ("Administrator", "Administrator")]
    job = submit(accounted, tmp_path / "a", "exit 3")
    slurm(accounted, "scontrol", "update", "nodename=n2", "state=down", "reason=fan | x")
    wait_for(lambda: [row["State"] for row in history(accounted) if row["JobID"] == job] == ["FAILED"], "it has failed")
    (tmp_path / "history").write_text(slurm(accounted, *COMMAND.replace("START", "now-1days").split()))
    (run,) = load(tmp_path / "history")
    assert (run.job, run.state, run.exit_code, run.nodes, run.user) == (job, "FAILED", "3:0", 1, user)
    events = lambda: slurm(accounted, "sacctmgr", "-P", "show", "event")  # noqa: E731
    wait_for(lambda: "|n2|" in events(), "its event is in the database")
    (tmp_path / "events").write_text(events())
    assert ("fail", "n2") in [(event.event, event.node) for event in trace.load(tmp_path / "events").events]


@pytest.mark.wide
def test_a_lost_node_and_a_killed_job_in_the_history_of_slurmdbd(accounted: LocalCluster, tmp_path: Path):
    """A job of two nodes loses one and is requeued; another is killed and submitted again; a third ends by itself. The
    killed one had run for a while, by the table: what dies within minutes has done it itself."""

    def runs(job: str, state: str) -> list[dict[str, str]]:
        return [row for row in history(accounted) if row["JobID"] == job and row["State"] == state]

    lost = submit(accounted, tmp_path / "a", "sleep 600", "-N2", "-J", "gpt", "--requeue")
    wait_for(lambda: runs(lost, "RUNNING"), "the job runs", limit=30)
    node = slurm(accounted, "squeue", "-h", "-j", lost, "-o", "%N")
    slurm(accounted, "scontrol", "update", f"nodename={node.strip().replace('[1-2]', '2')}", "state=down", "reason=x")
    wait_for(lambda: runs(lost, "NODE_FAIL") and runs(lost, "RUNNING"), "the job runs again", limit=60)
    slurm(accounted, "scancel", lost)
    wait_for(lambda: len(history(accounted)) == 2 and not runs(lost, "RUNNING"), "it has ended", limit=30)
    killed = submit(accounted, tmp_path / "b", "kill -9 $$", "-N2", "-J", "bert")
    wait_for(lambda: runs(killed, "FAILED"), "it is killed", limit=30)
    again = submit(accounted, tmp_path / "c", "exit 0", "-N2", "-J", "bert")
    wait_for(lambda: runs(again, "COMPLETED"), "the next one ends", limit=30)

    table = tmp_path / "history.txt"
    rows = history(accounted)
    for row in rows:
        row |= {key: earlier(row[key]) for key in ("Submit", "Start") if row["JobID"] == killed}
    table.write_text("\n".join("|".join(row) for row in ([*rows[0]], *(list(row.values()) for row in rows))))
    told = judge(load(table), Costs(setup=0.0, checkpoint=0.0)).to_dict()
    (first,), (then,) = runs(lost, "NODE_FAIL"), runs(killed, "FAILED")
    waits = [
        min(seconds(row["Start"]) for row in rows if row["JobID"] == lost and row != first) - seconds(first["End"]),
        seconds(runs(again, "COMPLETED")[0]["Start"]) - seconds(then["End"]),
    ]
    assert told["causes"] == {"node_failed": 1, "killed_from_outside": 1}
    assert told["lost_node_hours"] == pytest.approx(2 * sum(waits) / 3600)
    assert told["lost_node_hours_with_unicron"] <= told["lost_node_hours"]
