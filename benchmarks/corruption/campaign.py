"""Silent faults, one after another, in one running job; of each: who found it, how soon, and what is left of it.

The faults are those of `unicronctl inject flip:WHERE:BIT`. The job's iterations have losses that are known
(:mod:`benchmarks.corruption.train`), so a wrong state that is kept is seen, whoever did not see it.
"""

from __future__ import annotations

import math
import random
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.corruption import train_lines
from benchmarks.corruption.train_lines import Lines
from benchmarks.report import relative_difference
from tests.support.jobs import World
from unicron_detector.chaos.inject import UNITS
from unicron_transition.snapshot.image_format import BadImage, read_page

RANKS, MICRO_BATCHES, EPISODE = 3, 6, 80
EARLY, LATE = 10, 45  # iterations of an episode between which a fault is injected
AUDIT, COMPARE = 6, 6  # of the job
WINDOW = 18  # iterations that a fault has to be found in: three comparisons by M, six audits
SAME = 1e-6  # relative difference of two losses, or of a number before and after a flip, that is rounding
SETTLED = COMPARE + 1  # iterations without a finding after which nothing more will come
LIMIT = 120.0
CLASSES = {  # of the bits of a float32
    "sign": (31,),
    "exponent, high": (27, 28, 29, 30),
    "exponent, low": (23, 24, 25, 26),
    "mantissa, high": tuple(range(16, 23)),
    "mantissa, middle": tuple(range(8, 16)),
    "mantissa, low": tuple(range(8)),
}
SLOTS = r"(slots? [\d, -]*\d)"
FOUND = {  # who finds a fault, and the text of the failure
    "audit": rf"(?:{SLOTS} had another|differ in the) gradient of one",
    "comparison": rf"(?:{SLOTS} had another|differ in the) (?:state|parameters or)",
    "sum": rf"goes to {SLOTS} is spoilt|each other is spoilt|another sum of gradients|sum of the gradients of",
    "no step": rf"not sound on {SLOTS}|not finite on {SLOTS}",
}
ONCE = " once"  # a defective unit that errs a single time
KINDS = ("forward", "gradient", "wire", *(f"{unit}{ONCE}" for unit in UNITS), "weight", "moment", "memory", "file")
STRIKE = re.compile(r"element \[[\d, ]*\]: (\S+) is (\S+) now")


class Fault(NamedTuple):
    """A fault to inject."""

    kind: str
    """A place, with :data:`ONCE` if a unit errs once only."""
    bit: int
    slot: int

    @property
    def where(self) -> str:
        """The place."""
        return self.kind.removesuffix(ONCE)

    @property
    def order(self) -> str:
        """The fault as `unicronctl inject` takes it."""
        return f"flip:{self.where}:{self.bit}" + (":once" if self.kind.endswith(ONCE) else "")

    @property
    def bits(self) -> str:
        """The class of its bit."""
        return next(name for name, bits in CLASSES.items() if self.bit in bits)


@dataclass
class Outcome:
    """What became of a fault."""

    fault: Fault
    before: float = math.nan
    after: float = math.nan
    struck: int = -1
    """The iteration that it struck in; -1 if it did not."""
    by: str = ""
    """Who found it; empty if nobody did."""
    delay: int = 0
    """Iterations from the strike until it was found."""
    named: str = ""
    """The slots that were named."""
    right: bool = False
    """They are the one slot that was struck."""
    wrong: int = 0
    """Iterations of the job whose last loss or parameters are not what they must be, by more than rounding."""
    differs: bool = False
    """The job's last loss or parameters have other bits than they must have."""
    texts: list[str] = field(default_factory=list)

    @property
    def matters(self) -> bool:
        """The number has changed by more than rounding."""
        return not abs(self.after - self.before) <= SAME * abs(self.before)

    @property
    def harmless(self) -> bool:
        """Nobody has found it, and no loss was off by more than rounding."""
        return not self.by and not self.wrong


def faults(count: int, seed: int, kinds: Sequence[str]) -> Iterator[Fault]:
    """Yield faults of all kinds and classes by turns, with bits and slots by chance."""
    draw, classes = random.Random(seed), list(CLASSES)
    for number in range(count):
        kind = kinds[number % len(kinds)]
        turn = number // len(kinds) + number % len(kinds)
        bit, slot = draw.choice(CLASSES[classes[turn % len(classes)]]), draw.randrange(RANKS)
        yield Fault(kind, bit, 0 if kind == "memory" else slot)  # the first rank's copy is what all go on from


def verdict(text: str) -> tuple[str, str]:
    """Return who has found what a failure's text says, and the slots that it names; empty for another failure.

    >>> verdict("slot 2 had another state than the other replicas at iteration 7")
    ('comparison', 'slot 2')
    """
    for by, pattern in FOUND.items():
        if (found := re.search(pattern, text)) is not None:
            return by, "".join(filter(None, found.groups()))
    return "", ""


class Campaign:
    """A job of real ranks into which faults are injected."""

    def __init__(self, folder: Path):
        self.folder = folder
        variables = {
            "CORRUPTION_OUT": str(folder),
            "CORRUPTION_EPISODE": str(EPISODE),
            "CORRUPTION_MICRO_BATCHES": str(MICRO_BATCHES),
            "UNICRON_AUDIT": str(AUDIT),
            "UNICRON_COMPARE": str(COMPARE),
            "UNICRON_MODE": "session",
        }
        script = Path(train_lines.__file__).with_name("train.py")
        self.world = World(folder, RANKS, "allow_inject = true\n", [sys.executable, str(script)], **variables)
        self.lines, self._nodes = Lines(folder, RANKS), 0
        self.expected: dict[int, tuple[float, float]] = {}

    # ------------------------------------------------------------ the undisturbed job
    def learn(self) -> None:
        """Train two episodes, and take the losses of the first as what they must be. Raises AssertionError if the
        second has others."""
        self.wait(lambda: self.lines.reached() >= 2 * EPISODE, "two episodes", 900.0)
        self.expected = {iteration: self.lines.steps[0][iteration] for iteration in range(EPISODE)}
        wrong = self.wrong_iterations(0, 2 * EPISODE)
        assert not wrong, f"an undisturbed episode repeats: {wrong}"

    def wrong_iterations(self, first: int, end: int, most: float = SAME) -> list[int]:
        """Return the iterations whose last loss or parameters are further from what they must be in some rank."""
        found = []
        for iteration in range(first, end):
            right = self.expected[iteration % EPISODE]
            made = [steps[iteration] for steps in self.lines.steps.values() if iteration in steps]
            if any(relative_difference(a, b) > most for each in made for a, b in zip(each, right, strict=True)):
                found.append(iteration)
        return found

    # ------------------------------------------------------------ one fault
    def strike(self, fault: Fault) -> Outcome:
        """Inject a fault, wait for what becomes of it, and until the job is undisturbed again."""
        self.wait(self._ready, "the job is at a place for the next fault")
        outcome, after, struck = Outcome(fault), self._last_event(), len(self.lines.strikes[fault.slot])
        damaged, logged = self._damaged(), len(self.world.agents[fault.slot].log)
        if fault.where == "memory":
            (self.folder / "all-lost").touch()
        self.ask(fault.order, fault.slot)
        self.wait(lambda: len(self.lines.strikes[fault.slot]) > struck, f"{fault} strikes")
        text, outcome.struck = self.lines.strikes[fault.slot][struck]
        numbers = STRIKE.search(text)
        assert numbers is not None, text
        outcome.before, outcome.after = map(float, numbers.groups())
        if fault.where == "memory":
            killed = self.lines.last_strike
            self.wait(lambda: min(self.lines.began.values()) > killed, "the killed ranks train again", 300.0)
        elif fault.where == "file":
            if self._damaged() - damaged:
                outcome.by, outcome.right = "file check", True
        else:
            until = outcome.struck + WINDOW
            self.wait(lambda: self._find(outcome, after) or self.lines.now() > until, f"{fault} is found, or is not")
        if fault.kind in UNITS and not outcome.by:
            self.ask(f"flip:{fault.where}:63:once", fault.slot)  # no float32 has such a bit: it ends the one before
        self._settle()
        if fault.where == "memory":
            self._find_image(outcome, logged)
        else:
            self._find(outcome, after)
        first = max(0, outcome.struck - COMPARE - 1)
        outcome.wrong = len(self.wrong_iterations(first, self.lines.now()))
        outcome.differs = bool(self.wrong_iterations(self.lines.now() - 3, self.lines.now(), 0.0))
        if outcome.wrong or outcome.differs:
            self.wait(lambda: self.lines.now() // EPISODE > outcome.struck // EPISODE, "the next episode")
        return outcome

    def _ready(self) -> bool:
        return EARLY <= self.lines.now() % EPISODE <= LATE

    def _find(self, outcome: Outcome, after: int) -> bool:
        """Look for what has found the fault."""
        outcome.texts = [each["reason"] for each in self.world.events("failure_detected", after=after)]
        found = [(*verdict(text), text) for text in outcome.texts]
        found = [each for each in found if each[0]]
        if not found or outcome.by:
            return bool(outcome.by)
        outcome.by, outcome.named, text = found[0]
        outcome.right = all(named == f"slot {outcome.fault.slot}" for _, named, _ in found)
        at = re.search(r"iteration (\d+)", text)
        outcome.delay = int(at[1]) - outcome.struck if at else WINDOW
        return True

    def _find_image(self, outcome: Outcome, logged: int) -> None:
        """Look whether a rank that came after the kill passed the damaged copy over. It is read by who goes on from its
        own memory; another rank gets the state from that one."""
        lines = self.world.agents[outcome.fault.slot].log[logged:].splitlines()
        outcome.texts = [line for line in lines if "checksum" in line or "damaged" in line]
        outcome.by, outcome.right = ("image check", True) if outcome.texts else ("", False)

    def _damaged(self) -> set[Path]:
        found = set()
        for path in (self.folder / "checkpoints").rglob("*.image"):
            try:
                read_page(path).check_file()
            except BadImage:
                found.add(path)
            except OSError:
                continue  # removed meanwhile
        return found

    def _settle(self) -> None:
        """Wait until all train on and nothing more is found."""
        while True:
            reached, seen = max(self.lines.reached(), self.lines.now()), self._last_failure()
            self.wait(lambda end=reached + SETTLED: self._whole() and self.lines.now() >= end, "all train on")
            if self._last_failure() == seen:
                return

    # ------------------------------------------------------------ the job
    def _whole(self) -> bool:
        """Give the job another node for one that it has left."""
        for slot, agent in list(self.world.agents.items()):
            if not agent.alive:
                self._nodes += 1
                self.world.start_agent(slot, SLURMD_NODENAME=f"other{self._nodes}")
        return True

    def ask(self, fault: str, slot: int) -> None:
        """Inject this."""
        self.world.ask("inject", fault=fault, job="7", slot=slot, seconds=0.0 if "once" in fault else 60.0)

    def wait(self, look: Any, what: str, limit: float = LIMIT) -> None:
        """Wait for this, with all lines read before each look."""

        def found() -> Any:
            self.lines.read()
            return look()

        self.world.wait(found, what, limit)

    def _last_event(self) -> int:
        return max((each["id"] for each in self.world.events()), default=0)

    def _last_failure(self) -> int:
        return max((each["id"] for each in self.world.failures()), default=0)


def run(
    folder: Path, count: int, seed: int, kinds: Sequence[str], tell: Callable[[Outcome], None], seconds: float
) -> None:
    """Inject so many faults, as long as the time is not over; `tell` gets each outcome."""
    campaign = Campaign(folder)
    with campaign.world:
        campaign.learn()
        until = time.monotonic() + seconds
        for fault in faults(count, seed, kinds):
            if time.monotonic() > until:
                return
            tell(campaign.strike(fault))
