"""The case of transitions by size: its times, its rows, and jobs of any number of nodes."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from unittest.mock import Mock

import psutil
import pytest

from benchmarks.cases import transition
from benchmarks.cases.transition import Row, Sizes, Times, idlers, measure, medians, once
from benchmarks.leaderboard import failures, play, processes
from benchmarks.leaderboard.systems import SYSTEMS
from benchmarks.leaderboard.systems.base import Absent
from benchmarks.leaderboard.systems.launchers import Torchft, Torchrun
from benchmarks.report import Report


def burn(seconds: float) -> None:
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        pass


def test_only_what_ran_after_the_failure_counts_and_ended_threads_take_nothing_away(monkeypatch) -> None:
    monkeypatch.setattr(processes, "find", lambda run: [os.getpid()])
    times, system, end = Times(), Mock(run="1"), threading.Event()
    busy = threading.Thread(target=lambda: (burn(0.1), end.wait()))
    busy.start()
    burn(0.1)
    times.observe("before", system)
    times.observe("struck", system)
    end.set()
    busy.join()  # its 0.1 seconds are gone with it
    burn(0.05)
    times.observe("stepped", system)
    assert 0.04 < times.busy < 0.1 and times.waited >= 0


@pytest.mark.parametrize("name", SYSTEMS)
def test_a_system_has_as_many_nodes_as_it_is_told(name: str, tmp_path: Path) -> None:
    system = SYSTEMS[name](tmp_path / "7", size=7)
    assert system.size == 7 and SYSTEMS[name](tmp_path / "4").size == 4


def test_the_launchers_are_told_of_all_nodes(tmp_path: Path) -> None:
    torchrun, torchft = Torchrun(tmp_path / "a", size=7), Torchft(tmp_path / "b", size=7)
    torchrun.port = torchft.port = 1
    assert "--nnodes=1:7" in torchrun.node(0)
    assert torchft.more(0)["NUM_REPLICA_GROUPS"] == "7"


@pytest.mark.parametrize(("nodes", "hit"), [(2, 1), (4, 2), (16, 2)])
def test_a_failure_hits_a_node_that_there_is(nodes: int, hit: int, monkeypatch) -> None:
    struck, moments = list[int](), list[str]()
    monkeypatch.setitem(failures.FAILURES, "rank-kill", lambda system, node: struck.append(node))
    monkeypatch.setattr(play, "_in_an_iteration", lambda system: None)
    monkeypatch.setattr(play, "_recover", lambda *_: False)
    system = Mock(size=nodes, notes=[], variables={})
    limits = play.Limits(1.0, 1.0)
    assert not play._one_failure(system, "rank-kill", limits, lambda what, _: moments.append(what)).survived
    assert (struck, moments) == ([hit], ["before", "struck"])


def test_a_system_that_cannot_run_has_a_row_that_says_why(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setattr(SYSTEMS["torchft"], "version", Mock(side_effect=Absent("no torchft here")))
    row = once("torchft", 2, 0, 1.0, tmp_path)
    assert (row.why, row.next_step) == ("no torchft here", None)


def test_idle_processes_are_there_and_gone_afterwards(monkeypatch) -> None:
    monkeypatch.setattr(transition, "IDLE", transition.IDLE.replace("torch, torch.distributed", "sys"))
    before = set(psutil.Process().children())
    with idlers(2):
        beside = set(psutil.Process().children()) - before
        assert len(beside) == 2
    assert not any(each.is_running() for each in beside)


def fake(name: str, ranks: int, idle: int, limit: float, folder: Path) -> Row:
    """A system whose time doubles with each doubling, with a third of it when idle processes are beside it."""
    slow = 2.0 if idle else 1.0
    return Row(name, ranks, idle, 0.1 * ranks * slow, 0.2 * ranks * slow, 0.01 * ranks**0.5, 0.001 * ranks, 1.0)


def test_growth_is_from_the_fewest_ranks_to_the_most_and_idle_processes_are_apart(monkeypatch) -> None:
    monkeypatch.setattr(transition, "once", fake)
    sizes = Sizes(repeats=2, systems="unicron,torchrun")
    report = Report("transition", sizes)
    measure(sizes, report)
    rows = report.details["rows"]
    assert [(row["system"], row["ranks"], row["idle"]) for row in rows[:6]] == [
        ("unicron", 2, 0),
        ("torchrun", 2, 0),
        ("unicron", 2, 14),
        ("torchrun", 2, 14),
        ("unicron", 4, 0),
        ("torchrun", 4, 0),
    ]
    found = {figure.what: figure for figure in report.figures}
    grown = found["unicron: growth of the time to the next step"]
    assert (grown.value, grown.most) == (pytest.approx(8.0), 4.0)
    assert found["torchrun: growth of the time to the next step"].most is None
    assert found["unicron: to the next step, idle processes beside it"].value == pytest.approx(2.0)
    assert found["unicron: growth of the processors' time of a rank"].value == pytest.approx(8.0**0.5)


def test_a_figure_that_some_repeats_lack_is_the_median_of_the_others() -> None:
    rows = [Row("a", 2, next_step=1.0), Row("a", 2), Row("a", 2, next_step=3.0), Row("a", 4, next_step=9.0)]
    assert medians(rows, "a", 2) == {"next_step": 2.0}
    assert medians(rows, "b", 2) == {}
