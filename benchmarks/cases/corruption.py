"""Silent corruption: faults that are injected and found, runs without any, and what the checks cost.

The faults strike three real ranks under agents and a controller (:mod:`benchmarks.corruption.campaign`). Each is one of
three kinds: a defective unit errs in each of its sums until somebody stops it; a unit errs once; a number changes
where it is kept. What a unit spoils once can be found only in the one micro-batch in N that is audited.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from benchmarks.corruption import campaign, cost, healthy
from benchmarks.corruption.campaign import CLASSES, KINDS, ONCE, Outcome
from benchmarks.report import Report, quartiles
from unicron_detector.chaos.inject import UNITS


class Sizes(msgspec.Struct, frozen=True):
    """Sizes of a run."""

    faults: int = 344
    """Silent faults."""
    seed: int = 1
    """Of the faults, and of the runs without any."""
    runs: int = 30
    """Runs without a fault."""
    iterations: int = 2000
    """Of each of them."""
    pairs: int = 16
    """Pairs of blocks with and without checks."""
    ranks: int = 2
    """Of the training whose cost is measured."""
    minutes: float = 600.0
    """After which no fault is injected, and no run begun, any more."""
    only: str = "faults,healthy,cost"
    """Parts, with commas between."""


SMALLEST = Sizes(faults=len(KINDS), runs=2, iterations=60, pairs=2, ranks=2)
DENSE, USUAL = 32, 256  # N that is measured, and the default: one audit in 256 micro-batches is lost in the noise
COSTS = (  # M, micro-batches of a rank in an iteration, seconds of each, iterations of a block
    (64, 1, 0.030, 64),
    (64, 4, 0.025, 16),
)
MOST_COST = 1.01
BATCH = len(KINDS) * len(CLASSES)


def measure(sizes: Sizes, report: Report) -> None:
    """Measure the chosen parts."""
    parts: dict[str, Callable[[Sizes, Report], None]] = {"faults": faults, "healthy": runs, "cost": costs}
    for part in sizes.only.split(","):
        parts[part](sizes, report)


# ------------------------------------------------------------ faults
def faults(sizes: Sizes, report: Report) -> None:
    """Inject faults, and say what became of them by kind, and by class of bits."""
    what = f"audits of 1 micro-batch in {campaign.AUDIT}, comparisons every {campaign.COMPARE} iterations"
    report.text(f"{campaign.RANKS} ranks, {what}; a fault has {campaign.WINDOW} iterations to be found")
    outcomes: list[Outcome] = []

    def tell(outcome: Outcome) -> None:
        outcomes.append(outcome)
        report.text(line(outcome))

    until = time.monotonic() + 60.0 * sizes.minutes
    # A job of its own for each kind and class once: a slot that has failed for hours is started again after a minute.
    for number, first in enumerate(range(0, sizes.faults, BATCH)):
        count, left = min(BATCH, sizes.faults - first), until - time.monotonic()
        if left <= 0:
            break
        with tempfile.TemporaryDirectory(prefix="unicron-bench-", dir="/dev/shm", ignore_cleanup_errors=True) as folder:
            campaign.run(Path(folder), count, sizes.seed + number, KINDS, tell, left)
    report.details["faults"] = [msgspec.to_builtins(outcome) for outcome in outcomes]
    table(outcomes, report)
    totals(outcomes, report)


def line(outcome: Outcome) -> str:
    """Describe what became of a fault."""
    fault = outcome.fault
    found = f"{outcome.by} after {outcome.delay}, {outcome.named or 'nobody named'}" if outcome.by else "not found"
    kept = f", {outcome.wrong} wrong iterations kept" if outcome.wrong else ", other bits kept" * outcome.differs
    number = f"{outcome.before:.4g} -> {outcome.after:.4g}"
    return f"{fault.kind}, bit {fault.bit}, slot {fault.slot}, iteration {outcome.struck}: {number}: {found}{kept}"


def table(outcomes: Sequence[Outcome], report: Report) -> None:
    """Print found of all that matter, by kind and class of bits, and how many left a wrong state."""
    report.row("found / injected (wrong state kept)", *CLASSES, "all; right", label=36, width=17)
    for kind in KINDS:
        cells = []
        for name in CLASSES:
            those = [each for each in outcomes if each.fault.kind == kind and each.fault.bits == name and each.matters]
            wrong = kept(those)
            cells.append(f"{found_of(those)}/{len(those)} ({wrong})" if those else "-")
        those = [each for each in outcomes if each.fault.kind == kind and each.matters]
        right = sum(each.right for each in those)
        report.row(kind, *cells, f"{found_of(those)}/{len(those)}; {right}", label=36, width=17)


def found_of(outcomes: Sequence[Outcome]) -> int:
    """Return how many of them were found."""
    return sum(bool(each.by) for each in outcomes)


def kept(outcomes: Sequence[Outcome]) -> int:
    """Return after how many of them a wrong state was trained on with. Where the fault was found, another deal of the
    micro-batches may have added up to other bits, which is rounding."""
    return sum(each.wrong > 0 or (each.differs and not each.by) for each in outcomes)


def totals(outcomes: Sequence[Outcome], report: Report) -> None:
    """Print the figures of those that matter, apart for what only a lucky audit finds."""
    changed = [each for each in outcomes if each.matters]
    matters = [each for each in changed if not each.harmless]
    report.text(
        f"{len(outcomes)} faults: {len(changed)} changed a number by more than rounding, and of these "
        f"{len(changed) - len(matters)} were not found and changed no loss by more than rounding"
    )
    once = [each for each in matters if each.fault.kind.endswith(ONCE)]
    copies = [each for each in changed if each.fault.where in ("memory", "file")]
    lasting = [each for each in matters if each.fault.kind in UNITS or each.fault.where in ("weight", "moment")]
    found = [each for each in lasting if each.by]
    if found:
        right = sum(each.right for each in found) / len(found)
        named = [each for each in found if each.named]
        delays = sorted(each.delay for each in found)
        report.text(f"{len(lasting)} defective units and changed numbers; {len(named)} findings name a rank")
        report.figure("found, of defective units and changed numbers", len(found) / len(lasting), "", least=1.0)
        report.figure("culprit right, of all that was found", right, "", least=0.99)
        report.figure("iterations from the fault until it is found, median", statistics.median(delays))
        report.figure("the same, most", delays[-1], "", most=campaign.COMPARE)
        report.figure("wrong states kept after one of them", kept(lasting), "", most=0)
    if copies:
        report.text(f"{len(copies)} damaged copies of the state")
        report.figure("found when they are read, of damaged copies", found_of(copies) / len(copies), "", least=1.0)
        report.figure("wrong states kept after one of them", kept(copies), "", most=0)
    if once:
        report.text(f"{len(once)} numbers that a unit spoilt once")
        report.figure("found, of what a unit spoilt once: by an audit", found_of(once) / len(once))
        report.figure("wrong states kept after one of them, share", kept(once) / len(once))


# ------------------------------------------------------------ runs without a fault
def runs(sizes: Sizes, report: Report) -> None:
    """Train with nothing wrong, and count the alarms."""
    alarms, done, until = 0, 0, time.monotonic() + 60.0 * sizes.minutes
    for run in healthy.runs(sizes.runs, sizes.iterations, sizes.seed):
        if time.monotonic() > until:
            break
        with tempfile.TemporaryDirectory(prefix="unicron-bench-", ignore_cleanup_errors=True) as folder:
            found, told = healthy.alarms(Path(folder), run)
        alarms, done = alarms + bool(found), done + 1
        report.text(f"{run.title}: {'; '.join(found) or 'no alarm'}{''.join(f'; {text}' for text in told[:1])}")
    if done < sizes.runs:
        report.text(f"only {done} of {sizes.runs} runs were made")
    what = f"alarms in {done} runs of {sizes.iterations} iterations, N={healthy.AUDIT}, M={healthy.COMPARE}"
    report.figure(what, alarms, "", most=0)


# ------------------------------------------------------------ cost
def costs(sizes: Sizes, report: Report) -> None:
    """Compare iterations with and without checks, audited more often than by default: what exceeds 1 goes with 1/N."""
    for compare, each_rank, device, each in COSTS:
        found = cost.blocks(sizes.ranks, each_rank, device, DENSE, compare, sizes.pairs, each)
        title = f"M={compare}, {each_rank} micro-batch(es) a rank"
        report.details[title] = dict(found)
        on, off = found[cost.ON], found[cost.OFF]
        ratios = {
            "time": quartiles([block.wall for block in on], [block.wall for block in off]),
            "CPU time": quartiles([block.ranks for block in on], [block.ranks for block in off]),
        }
        seconds = statistics.median(block.wall for block in off)
        report.text(f"{title}: {sizes.pairs} pairs, iterations of {1e3 * seconds:.0f} ms without checks")
        for what, (low, middle, high) in ratios.items():
            report.text(f"{what} with checks / without at N={DENSE}: {middle:.4f} (quartiles {low:.4f} to {high:.4f})")
            usual = 1.0 + (middle - 1.0) * DENSE / USUAL
            report.figure(f"{what} with checks / without at N={USUAL}, {title}", usual, "", most=MOST_COST)
