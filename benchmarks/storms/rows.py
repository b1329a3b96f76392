"""The storms. Each row trains a job, does something to the cluster, and asks for what must be seen."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from benchmarks.storms.stage import BUSY_PAUSE, ELEMENTS, NEVER, Storm, halted

AFTERMATH = 10.0  # seconds that a row looks on after its storm: the harm of the old controllers came then
LOSS_PAUSE = 20.0  # gloo waits for TCP's repeated packets: seconds without a step are the network's doing


@dataclass(frozen=True)
class Row:
    """One line of the table: its name, what is done, what is asked, and the most seconds that it may take."""

    name: str
    what: str
    asked: str
    play: Callable[[Storm], None]
    limit: float


def head_silent(storm: Storm, seconds: float) -> None:
    """Nobody reaches the head, and the head nobody."""
    storm.train()
    since = storm.site.cut("head")
    time.sleep(seconds)
    storm.site.heal()
    time.sleep(AFTERMATH)
    storm.untouched(since)
    storm.figure("failures", len(storm.failures()))
    storm.ask(not storm.failures(), "no failure on record")


def controller_away(storm: Storm, seconds: float, forgets: bool) -> None:
    """The head is silent, and unicrond is started anew meanwhile."""
    storm.train()
    since = storm.site.cut("head")
    storm.site.controller.kill()
    time.sleep(seconds / 2)
    if forgets:
        storm.site.controller.forget()
    storm.site.controller.start()
    time.sleep(seconds / 2)
    storm.site.heal()
    time.sleep(AFTERMATH)
    storm.untouched(since)
    killed = storm.kill_rank(2)
    storm.at_most("rank killed later: next step", storm.next_step(killed) - killed, BUSY_PAUSE)


def rank_lost_in_silence(storm: Storm, seconds: float) -> None:
    """unicrond is stopped, and a rank is killed meanwhile."""
    storm.train()
    pid = storm.pid(2)
    storm.site.controller.freeze()
    time.sleep(1.0)
    os.kill(pid, signal.SIGKILL)
    killed = time.time()
    time.sleep(seconds)
    storm.site.controller.thaw()
    storm.at_most("kill to next step", storm.next_step(killed) - killed, 2.0)
    storm.figure("kill to whole", storm.whole_again() - killed, "s")
    storm.no_two_halves()


def node_lost_in_silence(storm: Storm, seconds: float) -> None:
    """While nobody reaches the head a node loses its power."""
    storm.train()
    victim = storm.job.node(1)
    storm.site.cut("head")
    time.sleep(seconds / 3)
    lost = time.time()
    storm.site.cluster.power_off(victim)
    time.sleep(2 * seconds / 3)
    healed = storm.site.heal()
    storm.at_most("end of silence to next step", storm.next_step(lost) - healed, 5.0)
    storm.figure("loss to whole", storm.whole_again() - lost, "s")
    storm.no_two_halves()
    storm.nothing_lost()
    storm.in_service(but=(victim,))


def node_cut_off(
    storm: Storm, at: str, count: int, slot: int, first: Callable[[Storm], object] = lambda _: None
) -> None:
    """A node falls silent while its rank is at a known point of its iteration."""
    storm.train(TINY_FAULT=halted(slot, at, count))
    victim = storm.job.node(slot)
    storm.arm(slot, at, functools.partial(first, storm))
    since = storm.site.cut(victim)
    storm.open_gate()
    storm.at_most("cut to next step", storm.next_step(since) - since, 3.0)
    storm.figure("whole", storm.whole_again() - since, "s")
    storm.no_two_halves()
    storm.nothing_lost()
    storm.in_service(but=(victim,))


def cut_off_and_back(storm: Storm, seconds: float) -> None:
    """A node is silent for a while. Its replacement may have begun."""
    storm.train()
    victim = storm.job.node(1)
    since = storm.site.cut(victim)
    time.sleep(seconds)
    storm.site.heal()
    time.sleep(AFTERMATH)
    if any(step["generation"] > storm.generation for step in storm.job.steps()):
        storm.at_most("cut to whole", storm.whole_again() - since, 15.0)
    else:
        storm.at_most("longest pause", storm.job.pause(since), seconds + BUSY_PAUSE)
    settled = storm.job.status()["generation"]
    time.sleep(AFTERMATH)
    now = storm.job.status()
    storm.ask(
        now["generation"] == settled, f"its replacement is not harmed (generation {settled}, {now['generation']})"
    )
    storm.ask(len(now["members"]) == ELEMENTS, f"the job is whole ({len(now['members'])} members)")
    storm.figure("requeues", storm.requeues())
    storm.ask(storm.requeues() <= 1, "no storm of requeues")
    storm.no_two_halves()
    storm.nothing_lost()
    storm.in_service(but=())


def cut_apart(storm: Storm, left: tuple[int, ...], right: tuple[int, ...]) -> None:
    """Elements that cannot reach each other; the head reaches all."""
    storm.train()
    sides = [",".join(storm.job.node(element) for element in side) for side in (left, right)]
    since = storm.site.cut(*sides)
    stepped = storm.next_step(since)
    found = min((failure["detected_at"] for failure in storm.failures()), default=NEVER)
    storm.figure("cut to found", found - since, "s")
    storm.at_most("found to next step", stepped - found if found < NEVER else NEVER, 5.0)
    storm.goes_on()
    storm.no_two_halves()
    storm.nothing_lost()
    storm.in_service(but=())
    storm.site.heal()
    storm.figure("whole again", storm.whole_again() - since, "s")


def packets_lost(storm: Storm, seconds: float) -> None:
    """Ten packets of a hundred are lost on all links, then thirty on one node's; agents pause now and then."""
    storm.train()
    since = time.time()
    everybody = ",".join(["head", *storm.site.cluster.spec.node_names])
    storm.site.loss(everybody, 0.1)
    _pauses(storm, seconds / 2)
    storm.site.loss(storm.job.node(1), 0.3)
    _pauses(storm, seconds / 2)
    steps = {step["iteration"] for step in storm.job.steps() if step["time"] > since}
    storm.figure("iterations", len(steps))
    storm.figure("longest pause", storm.job.pause(since), "s")
    false = [failure for failure in storm.failures() if failure["severity"] == 1]
    storm.figure("failures", len(storm.failures()))
    storm.ask(not false, f"no false loss ({', '.join(failure['cause'] for failure in false)})")
    storm.nothing_lost()
    storm.in_service(but=())
    storm.site.heal()
    storm.goes_on()


def slurmctld_hung(storm: Storm, seconds: float) -> None:
    """slurmctld answers nobody."""
    storm.train()
    since = time.time()
    with _stopped([p.pid for p in storm.site.cluster.processes() if p.kind == "slurmctld"]):
        time.sleep(seconds)
    time.sleep(AFTERMATH)
    storm.untouched(since)


def _pauses(storm: Storm, seconds: float) -> None:
    """For so long, stop one agent after the other for 2 s."""
    deadline = time.monotonic() + seconds
    agents = storm.agents()
    while time.monotonic() < deadline:
        agents = agents[1:] + agents[:1]
        time.sleep(min(8.0, seconds / 3))
        with _stopped(agents[:1]):
            time.sleep(2.0)


@contextlib.contextmanager
def _stopped(pids: list[int]) -> Iterator[None]:
    """SIGSTOP, and SIGCONT whatever happens."""
    try:
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        yield
    finally:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


def rows(loss_seconds: float) -> list[Row]:
    """The table, in the order in which it is run. loss_seconds: how long packets are lost."""
    make = functools.partial
    untouched = "no node drained or down, no job broken, no iteration lost"
    found = [
        Row(f"head-{n}", f"the head cut off for {n} s", untouched, make(head_silent, seconds=n), 300 + n)
        for n in (3, 15, 60)
    ]
    found += [
        Row(
            "restart", "the same, unicrond restarted", untouched, make(controller_away, seconds=15, forgets=False), 420
        ),
        Row(
            "empty",
            "the same, its state folder emptied",
            untouched,
            make(controller_away, seconds=15, forgets=True),
            420,
        ),
        Row(
            "rank-silence",
            "a rank killed while unicrond is stopped for 60 s",
            "next step <= 2 s",
            make(rank_lost_in_silence, seconds=60),
            480,
        ),
        Row(
            "node-silence",
            "a node lost while the head is cut off",
            "next step <= 5 s after the silence",
            make(node_lost_in_silence, seconds=15),
            480,
        ),
        Row(
            "cut-computing",
            "a node cut off in computing",
            "next step <= 3 s",
            make(node_cut_off, at="fetch", count=1, slot=1),
            480,
        ),
        Row(
            "cut-reduce",
            "a node cut off in the reduce",
            "next step <= 3 s",
            make(node_cut_off, at="reduce", count=1, slot=1),
            480,
        ),
        Row(
            "cut-transfer",
            "a node cut off in a transfer",
            "next step <= 3 s",
            make(node_cut_off, at="transfer", count=0, slot=0, first=lambda storm: storm.kill_rank(2)),
            480,
        ),
    ]
    found += [
        Row(
            f"back-{n}",
            f"a node cut off for {n} s and back",
            "whole <= 15 s, replacement unharmed, no node out of service",
            make(cut_off_and_back, seconds=n),
            480,
        )
        for n in (1, 5, 9, 30)
    ]
    found += [
        Row(
            "pair",
            "two nodes that cannot reach each other",
            "goes on <= 5 s after it is found, no node blamed",
            make(cut_apart, left=(0,), right=(1,)),
            480,
        ),
        Row(
            "halves",
            "a job cut into one node and two",
            "the larger half goes on <= 5 s after it is found",
            make(cut_apart, left=(1,), right=(0, 2)),
            480,
        ),
        Row(
            "loss",
            "10 % of packets lost everywhere, then 30 % at one node; agents pause",
            "no false loss",
            make(packets_lost, seconds=loss_seconds),
            420 + 2 * loss_seconds,
        ),
        Row("slurmctld", "slurmctld hung for 20 s", "training does not notice", make(slurmctld_hung, seconds=20), 300),
    ]
    return found
