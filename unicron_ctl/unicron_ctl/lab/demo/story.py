"""The demo's five chapters. Each begins when the failure of the one before is healed."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from unicron_ctl.lab.demo.stage import DemoJob, Stage
from unicron_ctl.shared.protocol.answer_schema import Failure, Status
from unicron_ctl.shared.system.errors import UserError

HEAL_SECONDS = 150.0
FINISH_SECONDS = 400.0
FIRST_ITERATION = 3  # nothing is broken before the jobs have warmed up
POLL_SECONDS = 0.25
FLIP = "flip:weight:22"  # the highest bit of a mantissa: the number stays an ordinary one


@dataclass
class Injury:
    """One failure that the demo causes."""

    kind: str
    """A kind of the contract (docs/design/README.md)."""
    job: str
    what: str
    """A text for people."""
    injected_at: float
    healed_at: float = 0.0
    neighbours: tuple[int, ...] = ()
    """The processes beside the one that dies, which must live on."""


class Story:
    """Plays the chapters on a stage. It calls `add_line(text)` for each event and `show(status)` at each poll."""

    def __init__(self, stage: Stage, add_line: Callable[[str], None], show: Callable[[Status], None]):
        self.stage, self.add_line, self.show = stage, add_line, show
        self.injuries: list[Injury] = []

    def play(self) -> None:
        """Play all chapters. Raises UserError if one is not healed in time."""
        large, small = self.stage.jobs
        self._wait_until(
            lambda: all(self._at(job, job.elements, FIRST_ITERATION) for job in self.stage.jobs),
            "the jobs did not start training",
        )
        for job in self.stage.jobs:
            self.stage.start_reference(job)
        self._ranks_die(large, small)
        lost = self._node_dies_with_spare(large)
        second = self._node_dies_without_spare(large, small)
        self._nodes_return([lost, second], small)
        self._bit_flips(large)
        self.add_line("all is healed: both jobs are asked to end")
        for job in self.stage.jobs:
            self.stage.finish(job)
        self._wait_until(
            lambda: all((known := self.stage.job(job.name)) and known.ended for job in self.stage.jobs),
            "the jobs did not finish",
            FINISH_SECONDS,
        )
        trained = {job.name: self.stage.known_job(job.name).iteration + 1 for job in self.stage.jobs}
        iterations = ", ".join(f"iteration {count} of {name}" for name, count in trained.items())
        self.add_line(f"waiting for the undisturbed runs to reach {iterations}")
        self._wait_until(
            lambda: self.stage.references_reached(trained), "the reference runs did not get there", FINISH_SECONDS
        )

    # ------------------------------------------------------------ chapters
    def _ranks_die(self, large: DemoJob, small: DemoJob) -> None:
        """Kill a rank of each job at the same time. The rank of the second job has a neighbour on its node."""
        for job in (large, small):
            element = job.elements - 1
            neighbours = tuple(self.stage.pids(job.name, element)[:-1])
            when = self.stage.kill_rank(job.name, element)
            beside = ", its neighbour on the node lives" if neighbours else ""
            rank = job.elements * job.ranks_per_node - 1
            self._add_injury("rank", job, f"kill -9 of rank {rank} of {job.name}{beside}", when)
            self.injuries[-1].neighbours = neighbours
        self._await_healing(
            lambda: all([self._whole(injury, job) for injury, job in zip(self.injuries, (large, small), strict=True)]),
            "a rank that was killed did not come back",
        )
        if self.injuries[1].neighbours != tuple(self.stage.pids(small.name, small.elements - 1)[:-1]):
            raise UserError(f"{small.name}: a rank died alone, and its neighbour was started again with it")

    def _whole(self, injury: Injury, job: DemoJob) -> bool:
        """Whether the job has its rank again. Notes the time at which that was first seen."""
        if not injury.healed_at and self.record(injury) is not None and self._at(job, job.elements):
            injury.healed_at = time.time()
        return bool(injury.healed_at)

    def _node_dies_with_spare(self, job: DemoJob) -> str:
        node = self.stage.node_of(job.name, 1)
        when = self.stage.power_off(node)
        self._add_injury("node", job, f"power-off of {node}, with a spare node at hand", when)
        self._await_healing(lambda: self._at(job, job.elements), f"{job.name} did not get the spare node")
        return node

    def _node_dies_without_spare(self, large: DemoJob, small: DemoJob) -> str:
        node = self.stage.node_of(large.name, 0)
        when = self.stage.power_off(node)
        self._add_injury(
            "node",
            large,
            f"power-off of {node}, none left: {large.name} weighs {large.weight:g}, {small.name} {small.weight:g}",
            when,
        )
        self._await_healing(
            lambda: self._at(large, large.elements) and self._at(small, small.elements - 1),
            f"no node moved from {small.name} to {large.name}",
        )
        return node

    def _nodes_return(self, nodes: list[str], small: DemoJob) -> None:
        when = time.time()
        for node in nodes:
            self.stage.cluster.power_on(node)
        both = " and ".join(nodes)
        self._add_injury("join", small, f"{both} come back repaired, one of them as a spare", when)
        self._await_healing(lambda: self._at(small, small.elements), f"{both}: none was given to {small.name}")

    def _bit_flips(self, job: DemoJob) -> None:
        """Flip a bit in a weight of one rank, which raises nothing. It is healed when all train from a sound state."""
        slot, generation = job.elements - 1, self.stage.known_job(job.name).generation
        when = self.stage.inject(job.name, FLIP, slot)
        self._add_injury("flip", job, f"unicronctl inject --job {self.stage.ids[job.name]} --slot {slot} {FLIP}", when)
        self._await_healing(
            lambda: self.stage.known_job(job.name).generation > generation and self._at(job, job.elements),
            f"{job.name} did not go back to a sound state with all its nodes",
        )

    # ------------------------------------------------------------ helpers
    def _at(self, job: DemoJob, nodes: int, iteration: int = 0) -> bool:
        """Whether the job trains on exactly so many nodes, and has reached the iteration. Raises UserError if it has
        ended."""
        found = self.stage.job(job.name)
        if found is None:
            return False
        if found.ended:
            raise UserError(f"{job.name} ended before the demo was over; run it again with --keep and read its logs")
        whole = len(found.members) == nodes * job.ranks_per_node and found.nodes == nodes
        return found.state == "running" and whole and found.iteration >= iteration

    def record(self, injury: Injury) -> Failure | None:
        """Return the controller's record of this failure: the job's first one that was detected after it was caused."""
        job = self.stage.ids[injury.job]
        failures = self.stage.status().failures
        return next((f for f in failures if f.job == job and f.detected_at >= injury.injected_at), None)

    def _add_injury(self, kind: str, job: DemoJob, what: str, when: float) -> None:
        self.injuries.append(Injury(kind, job.name, what, when))
        self.add_line(what)

    def _await_healing(self, done: Callable[[], bool], complaint: str) -> None:
        injury = self.injuries[-1]
        if injury.kind != "join":
            self._wait_until(lambda: self.record(injury) is not None, f"nobody noticed: {injury.what}")
        self._wait_until(done, complaint)
        injury.healed_at = injury.healed_at or time.time()
        self.add_line(f"healed after {injury.healed_at - injury.injected_at:.1f} s")

    def _plan(self) -> str:
        """Return the controller's reasons for the nodes of each job."""
        reasons, ids = self.stage.status().plan.reasons or {}, self.stage.ids
        return "; ".join(f"{name} {reasons[job]}" for name, job in ids.items() if job in reasons)

    def _wait_until(self, done: Callable[[], bool], complaint: str, seconds: float = HEAL_SECONDS) -> None:
        deadline = time.monotonic() + seconds
        while not done():
            if time.monotonic() > deadline:
                raise UserError(
                    f"{complaint} within {seconds:.0f} s; the controller's plan: {self._plan()}; "
                    f"its logs are in {self.stage.folder}"
                )
            self.show(self.stage.status())
            time.sleep(POLL_SECONDS)
