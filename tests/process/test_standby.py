"""A controller and its standby as real processes on one state folder, with real agents: the standby takes over from one
that was killed or frozen, and the frozen one does nothing when it wakes."""

from __future__ import annotations

import json
import os
import random
import signal
import sqlite3
import subprocess
import sys
import time

import pytest

from tests.support.heads import Head, Heads, contiguous, free_port
from tests.support.jobs import SLEEPS, Job, scripted
from tests.support.processes import ROOT, outside_slurm, wait_for
from unicron_ctl.shared.protocol.client import ask_and_see

pytestmark = [pytest.mark.process, pytest.mark.timeout(300)]
TAKES_OVER_SECONDS = 15.0  # less than five, and what a busy machine adds


@pytest.fixture
def heads(tmp_path):
    made = Heads(tmp_path)
    yield made
    made.close()


@pytest.fixture
def job(heads, tmp_path):
    made = Job(tmp_path, heads.address, "21", 2, scripted(tmp_path, SLEEPS), UNICRON_MODE="session")
    try:
        wait_for(lambda: len(pids(heads)) == 2, "both ranks are started", 60.0, lambda: f"{heads.first.log}{made.logs}")
        yield made
    finally:
        made.close()


def pids(heads: Heads) -> dict[int, int]:
    """Slot -> process id, as the controller knows them."""
    ranks = [rank for element in heads.job().get("elements", []) for rank in element["ranks"]]
    return {rank["slot"]: rank["pid"] for rank in ranks if rank.get("pid")}


def heals(heads: Heads, job: Job) -> None:
    """The controller starts a rank again that is killed."""
    before = wait_for(lambda: len(found := pids(heads)) == 2 and found, "both ranks are known", 60.0, lambda: job.logs)
    os.kill(before[0], signal.SIGKILL)
    wait_for(
        lambda: (now := pids(heads)).get(0, before[0]) != before[0] and now.get(1) == before[1],
        "the rank is started again",
        60.0,
        lambda: f"{heads.first.log}\n{heads.second.log}\n{job.logs}",
    )


@pytest.mark.parametrize("how", [signal.SIGSTOP, pytest.param(signal.SIGKILL, marks=pytest.mark.wide)])
def test_the_standby_takes_over(heads, job, how):
    """Killed: its lock is free at once. Frozen: its lease ends; what it does when it wakes counts for nothing."""
    last = heads.ids()[-1]
    began = time.monotonic()
    heads.first.process.send_signal(how)
    heads.second.await_lead(30.0)
    took = time.monotonic() - began
    assert took <= TAKES_OVER_SECONDS, heads.second.log
    assert ask_and_see({"kind": "ping"}, heads.address, 10.0)[1].endpoint == heads.second.address
    kinds = wait_for(lambda: heads.kinds(last), "its start is in the log", 30.0)
    assert kinds[0] == "started", "nothing else was written"
    heals(heads, job)
    if how == signal.SIGSTOP:
        last = heads.ids()[-1]
        heads.first.process.send_signal(signal.SIGCONT)
        assert heads.first.process.wait(30.0) == 1
        assert "has taken it over: this unicrond ends" in heads.first.log
        assert heads.second.leads and "started" not in heads.kinds(last)
        heals(heads, job)
    assert contiguous(heads.ids())
    assert all(agent.alive for agent in job.agents.values())


@pytest.mark.wide
def test_of_many_contenders_that_are_killed_and_frozen_no_two_ever_act(tmp_path):
    """They do nothing but contend, for half a minute. In the log no record of a term comes after one of a later term,
    and by their common clock no term acts after a later one has begun to."""
    chance, running = random.Random(7), dict[int, subprocess.Popen[bytes]]()
    folder = tmp_path / "state"

    def start(number: int) -> None:
        words = [sys.executable, "-m", "tests.support.contender", str(folder), str(tmp_path / f"notes.{number}")]
        with (tmp_path / "errors").open("ab") as errors:
            running[number] = subprocess.Popen(words, cwd=ROOT, env=outside_slurm(), stderr=errors)

    try:
        for number in range(3):
            start(number)
        wait_for(lambda: list(tmp_path.glob("notes.*")), "one acts", 60.0)
        until = time.monotonic() + 30.0
        while time.monotonic() < until:
            time.sleep(chance.uniform(0.0, 0.6))
            number = chance.randrange(3)
            if chance.random() < 0.3:
                running[number].kill()
                running[number].wait()
                start(number)
            else:
                running[number].send_signal(signal.SIGSTOP)
                time.sleep(chance.uniform(0.0, 1.5))
                running[number].send_signal(signal.SIGCONT)
    finally:
        for process in running.values():
            process.kill()
            process.wait()
    with sqlite3.connect(folder / "events.sqlite") as log:
        assert log.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        rows = log.execute("SELECT id, payload FROM event ORDER BY id").fetchall()
    terms = [int(json.loads(payload)["reason"]) for _, payload in rows]
    assert contiguous([number for number, _ in rows]) and terms == sorted(terms)
    acts = [line.split() for path in tmp_path.glob("notes.*") for line in path.read_text().splitlines()]
    acted = sorted((float(at), int(number)) for number, at in (act for act in acts if len(act) == 2))
    order = [number for _, number in acted]
    assert order == sorted(order), "one acted while a later one did"
    assert len(set(order)) >= 8, "too few terms to show anything"


def test_two_that_lead_with_a_folder_each_notice_it_and_end(tmp_path):
    addresses = [f"tcp://127.0.0.1:{free_port()}" for _ in range(2)]
    heads = [Head(tmp_path, str(n), address, addresses, f"state{n}") for n, address in enumerate(addresses)]
    try:
        wait_for(lambda: any(head.process.poll() is not None for head in heads), "one has ended", 60.0)
        ended = next(head for head in heads if head.process.poll() is not None)
        assert ended.process.returncode == 1
        assert "another unicrond leads at 127.0.0.1:" in ended.log and "both need the same folder" in ended.log
    finally:
        for head in heads:
            head.close()
