"""The storms. Each row trains a job, disturbs the cluster, and checks what must hold."""

from __future__ import annotations

import functools
import os
import random
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from benchmarks.storms.soak import soak
from benchmarks.storms.stage import BUSY_PAUSE, ELEMENTS, NEVER, Clock, Storm, halted, stopped

AFTERMATH = 10.0  # seconds of watching after a storm: controllers of earlier releases did harm then
MOST_CUT = 50  # the most records that a power cut takes off the end of the log


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    name: str
    what: str
    goal: str
    play: Callable[[Storm], None]
    limit: float
    """The most seconds that it may take."""


def head_silent(storm: Storm, seconds: float) -> None:
    """Cut the head off from all nodes."""
    storm.train()
    since = storm.site.cut("head")
    time.sleep(seconds)
    storm.site.heal()
    time.sleep(AFTERMATH)
    storm.untouched(since)
    storm.figure("failures", len(storm.failures()))
    storm.ask(not storm.failures(), "no failure on record")


def controller_away(storm: Storm, seconds: float, forgets: bool) -> None:
    """Cut the head off, and restart unicrond meanwhile."""
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


def rank_lost_while_away(storm: Storm, seconds: float, forgets: bool) -> None:
    """Kill unicrond and start it later; kill a rank meanwhile."""
    storm.train()
    storm.site.controller.kill()
    time.sleep(seconds / 2)
    killed = storm.kill_rank(2)
    stepped = storm.next_step(killed)
    if forgets:
        storm.site.controller.forget()
    storm.site.controller.start()
    storm.at_most("kill to next step", stepped - killed, 2.0)
    storm.figure("kill to whole", storm.whole_again() - killed, "s")
    storm.unharmed()


def controller_killed(storm: Storm, count: int) -> None:
    """Kill unicrond at random moments, most of them in the transitions after killed ranks."""
    storm.train()
    chance, ranks, began = random.Random(count), 0, time.time()
    for turn in range(count):
        if turn % 5 == 0:
            ranks += storm.kill_some_rank(chance)
        time.sleep(chance.uniform(0.0, 1.5))
        storm.site.controller.kill()
        storm.site.controller.start()
    storm.figure("unicrond killed", count)
    storm.figure("ranks killed", ranks)
    storm.figure("longest pause", storm.job.pause(began), "s")
    _as_before(storm)


def log_cut(storm: Storm, times: int) -> None:
    """Cut the power of unicrond's machine, so that the log loses its last records."""
    storm.train()
    chance = random.Random(times)
    for turn in range(times):
        if turn % 2 == 0:
            storm.kill_some_rank(chance)
        time.sleep(chance.uniform(0.0, 4.0))
        storm.site.controller.kill()
        storm.cut_log(chance.choice((1, 2, 3, 5, 10, 20, MOST_CUT)))
        storm.site.controller.start()
        storm.goes_on()
    storm.figure("power cuts", times)
    _as_before(storm)


def _as_before(storm: Storm) -> None:
    """Check that the job becomes whole, nothing was lost, and no node or hold is left behind."""
    storm.whole_now()
    storm.goes_on()
    storm.unharmed()
    storm.nothing_held()


def rank_lost_in_silence(storm: Storm, seconds: float) -> None:
    """Stop unicrond, and kill a rank meanwhile."""
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
    """Cut the power of a node while the head is cut off."""
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
    storm.unharmed(but=(victim,))


def node_cut_off(
    storm: Storm, at: str, count: int, slot: int, first: Callable[[Storm], object] = lambda _: None
) -> None:
    """Cut off a node while its rank is at a known point of its iteration."""
    storm.train(TINY_FAULT=halted(slot, at, count))
    victim = storm.job.node(slot)
    storm.arm(slot, at, functools.partial(first, storm))
    since = storm.site.cut(victim)
    storm.open_gate()
    storm.at_most("cut to next step", storm.next_step(since) - since, 3.0)
    storm.figure("whole", storm.whole_again() - since, "s")
    storm.unharmed(but=(victim,))


def cut_off_and_back(storm: Storm, seconds: float) -> None:
    """Cut off a node for a while, in which its replacement may begin."""
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
    generations = f"{settled}, {now['generation']}"
    storm.ask(now["generation"] == settled, f"its replacement is not harmed (generation {generations})")
    storm.ask(len(now["members"]) == ELEMENTS, f"the job is whole ({len(now['members'])} members)")
    storm.figure("requeues", storm.requeues())
    storm.ask(storm.requeues() <= 1, "no storm of requeues")
    storm.unharmed()


def cut_apart(storm: Storm, left: tuple[int, ...], right: tuple[int, ...]) -> None:
    """Cut elements off from each other; the head reaches all."""
    storm.train()
    sides = [",".join(storm.job.node(element) for element in side) for side in (left, right)]
    since = storm.site.cut(*sides)
    stepped = storm.next_step(since)
    found = min((failure["detected_at"] for failure in storm.failures()), default=NEVER)
    storm.figure("cut to found", found - since, "s")
    storm.at_most("found to next step", stepped - found if found < NEVER else NEVER, 5.0)
    storm.goes_on()
    storm.unharmed()
    storm.site.heal()
    storm.figure("whole again", storm.whole_again() - since, "s")


def cut_through_the_head(storm: Storm, seconds: float) -> None:
    """Cut the head and the smaller part of a job off from the larger part."""
    storm.train()
    with_head = ",".join(["head", storm.job.node(0)])
    since = storm.site.cut(with_head, ",".join(storm.job.node(element) for element in (1, 2)))
    time.sleep(seconds)
    storm.no_two_halves()
    healed = storm.site.heal()
    storm.goes_on()
    steps = [step["time"] for step in storm.job.steps() if step["time"] > healed]
    storm.at_most("end of the cut to next step", min(steps, default=NEVER) - healed, 15.0)
    storm.figure("longest pause", storm.job.pause(since), "s")
    storm.unharmed()


def packets_lost(storm: Storm, seconds: float) -> None:
    """Lose 10 % of the packets on all links, then 30 % on one node's, and pause agents now and then."""
    storm.train()
    since = time.time()
    everything = ",".join(["head", *storm.site.cluster.spec.node_names])
    storm.site.loss(everything, 0.1)
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
    """Stop slurmctld."""
    storm.train()
    since = time.time()
    with stopped([p.pid for p in storm.site.cluster.processes() if p.kind == "slurmctld"]):
        time.sleep(seconds)
    time.sleep(AFTERMATH)
    storm.untouched(since)


def slurmctld_slow(storm: Storm, seconds: float) -> None:
    """Delay slurmctld's answers by three seconds."""
    storm.train()
    since = time.time()
    while time.time() < since + seconds:
        with stopped([p.pid for p in storm.site.cluster.processes() if p.kind == "slurmctld"]):
            time.sleep(3.0)
        time.sleep(0.2)
    time.sleep(AFTERMATH)
    storm.untouched(since)


def daemons_restarted(storm: Storm, kind: str, seconds: float) -> None:
    """End slurmctld, or all slurmd, and start them later, as an upgrade does; then kill a rank."""
    storm.train()
    since = time.time()
    for process in storm.site.cluster.processes():
        if process.kind == kind:
            os.kill(process.pid, signal.SIGKILL if kind == "slurmctld" else signal.SIGTERM)
    time.sleep(seconds)
    storm.site.cluster.up()
    time.sleep(AFTERMATH)
    storm.untouched(since)
    killed = storm.kill_rank(2)
    storm.at_most("rank killed later: next step", storm.next_step(killed) - killed, BUSY_PAUSE)


def clocks_stepped(storm: Storm) -> None:
    """Step the time of day by 60 s in both directions for agents and ranks, and for unicrond, which restarts then.

    Times are not comparable here, so iterations are counted.
    """
    nodes, head = Clock(storm.site.folder / "clock.nodes"), Clock(storm.site.folder / "clock.head")
    controller = storm.site.controller
    before = dict(controller.environment)
    controller.environment |= head.environment
    try:
        controller.kill()
        controller.start()
        storm.train(**nodes.environment)
        for clock, seconds in ((nodes, 60), (head, 60), (nodes, -60), (head, -60), (nodes, 0), (head, 0)):
            clock.step(seconds)
            time.sleep(AFTERMATH)
            storm.goes_on()
        head.step(-60)
        controller.kill()
        controller.start()
        time.sleep(AFTERMATH)
        storm.goes_on()
        broken = {step["generation"] for step in storm.job.steps()} - set(range(storm.generation + 1))
        storm.ask(not broken, f"no job broken (generations {broken} after {storm.generation})")
        storm.figure("failures", len(storm.failures()))
        storm.ask(not storm.failures(), "no failure on record")
        storm.nothing_lost()
        storm.in_service(but=())
        killed = time.monotonic()
        storm.kill_rank(2)
        storm.ask(storm.next_step(NEVER) < NEVER, "a rank killed later: the others go on")
        storm.at_most("rank killed later: next step", time.monotonic() - killed, BUSY_PAUSE)
    finally:
        controller.environment = before


def _pauses(storm: Storm, seconds: float) -> None:
    """Stop one agent after the other for 2 s each."""
    deadline = time.monotonic() + seconds
    agents = storm.agents()
    while time.monotonic() < deadline:
        agents = agents[1:] + agents[:1]
        time.sleep(min(8.0, seconds / 3))
        with stopped(agents[:1]):
            time.sleep(2.0)


def rows(loss_seconds: float, kills: int, soak_seconds: float, seed: int) -> list[Row]:
    """Return the table in its order."""
    untouched = "no node drained or down, no job broken, no iteration lost"
    kept = "no job lost, no node leaked"
    unnoticed = "training does not notice"
    kill, cut = "next step <= 2 s", "next step <= 3 s"
    unharmed = "whole <= 15 s, replacement unharmed, no node out of service"
    found: list[Row] = []

    def add(name: str, what: str, goal: str, limit: float, play: Callable[..., None], **settings: Any) -> None:
        found.append(Row(name, what, goal, functools.partial(play, **settings), limit))

    for n in (3, 15, 60):
        add(f"head-{n}", f"the head cut off for {n} s", untouched, 300 + n, head_silent, seconds=n)
    ways = (("restart", "unicrond restarted", False), ("empty", "its state emptied", True))
    for name, what, forgets in ways:
        add(name, f"the same, {what}", untouched, 420, controller_away, seconds=15, forgets=forgets)
    for name, what, forgets in (("restart-kill", "restarted", False), ("empty-kill", "its state emptied", True)):
        what = f"a rank killed while unicrond is away, {what} then"
        add(name, what, f"{kill}, whole later", 420, rank_lost_while_away, seconds=10, forgets=forgets)
    what = "a rank killed while unicrond is stopped for 60 s"
    add("rank-silence", what, kill, 480, rank_lost_in_silence, seconds=60)
    what = "a node lost while the head is cut off"
    add("node-silence", what, "next step <= 5 s after the silence", 480, node_lost_in_silence, seconds=15)
    what = f"kill -9 of unicrond at {kills} random moments, ranks killed meanwhile"
    add("kills", what, kept, 420 + 6 * kills, controller_killed, count=kills)
    add("power", f"the last 1 to {MOST_CUT} records of the log lost", kept, 600, log_cut, times=8)
    for name, what, at in (("computing", "computing", "fetch"), ("reduce", "the reduce", "reduce")):
        add(f"cut-{name}", f"a node cut off in {what}", cut, 480, node_cut_off, at=at, count=1, slot=1)
    transfer = {"at": "transfer", "count": 0, "slot": 0, "first": lambda storm: storm.kill_rank(2)}
    add("cut-transfer", "a node cut off in a transfer", cut, 480, node_cut_off, **transfer)
    for n in (1, 5, 9, 30):
        add(f"back-{n}", f"a node cut off for {n} s and back", unharmed, 480, cut_off_and_back, seconds=n)
    goal = "goes on <= 5 s after it is found, no node blamed"
    add("pair", "two nodes that cannot reach each other", goal, 480, cut_apart, left=(0,), right=(1,))
    goal = "the larger half goes on <= 5 s after it is found"
    add("halves", "a job cut into one node and two", goal, 480, cut_apart, left=(1,), right=(0, 2))
    what, goal = "a job cut apart, the head with the smaller half", "never two halves, on <= 15 s after it"
    add("halves-head", what, goal, 480, cut_through_the_head, seconds=30)
    what = "10 % of packets lost everywhere, then 30 % at one node; agents pause"
    add("loss", what, "no false loss", 420 + 2 * loss_seconds, packets_lost, seconds=loss_seconds)
    add("slurmctld", "slurmctld hung for 20 s", unnoticed, 300, slurmctld_hung, seconds=20)
    add("slurmctld-slow", "slurmctld slow for 30 s", unnoticed, 300, slurmctld_slow, seconds=30)
    what = "slurmctld killed, back after 20 s"
    add("slurmctld-dead", what, unnoticed, 300, daemons_restarted, kind="slurmctld", seconds=20)
    what = "slurmd restarted everywhere (an upgrade)"
    add("slurmds", what, unnoticed, 300, daemons_restarted, kind="slurmd", seconds=5)
    add("clocks", "clocks stepped by +-60 s", unnoticed, 420, clocks_stepped)
    what, goal = "all of it, drawn at random, again and again", "whole each time, nothing lost, never two halves"
    add("soak", what, goal, 420 + 2 * soak_seconds, soak, seconds=soak_seconds, seed=seed)
    return found
