"""A whole node, and all ranks, of a DP2 x TP2 job with the distributed optimizer: from the kill to the next step.

The job writes no checkpoint, so there is no file to go on from. The ranks are forks of a process that has imported
everything, as an agent's zygote is. For each case the median seconds from the last kill to the first step after it,
the iterations that were lost, and the largest difference of a gradient to the undisturbed run's, relative to its
largest element.
"""

from __future__ import annotations

import statistics
import tempfile
from pathlib import Path

from benchmarks.marks import print_figure
from tests.support import proof
from tests.support.moments import fault
from tests.support.rank_harness import Ranks

SIZE, RANKS, HIT, ITERATIONS = 2, 4, 3, 6
MODEL = {"TINY_LAYOUT": "2 1 1", "TINY_DISTOPT": "1", "TINY_SLOW": "0.05", "TINY_ITERATIONS": str(ITERATIONS)}
CASES = {"a node lost": [2, 3], "all ranks killed": [0, 1, 2, 3]}


def train(out: Path, killed: list[int]) -> Ranks:
    """One run; a node that is lost does not come back."""
    memory = out / "memory"
    memory.mkdir(parents=True)
    faults = [fault(slot, HIT, "fetch", kind="late", delay=0.1) for slot in killed]
    restart = len(killed) == RANKS
    found = Ranks(out, RANKS, faults, fork=True, replica=SIZE, restart=restart, UNICRON_MEMORY=str(memory), **MODEL)
    found.drive()
    return found


def measured(out: Path, reference: Path, killed: list[int]) -> dict[str, float]:
    """Of one run."""
    ranks = train(out, killed)
    ends = max(float(path.read_text()) for path in out.glob("fault.*"))
    after = [step for step in ranks.steps if step["at"] > ends]
    before = max(step["iteration"] for step in ranks.steps if step["at"] <= ends)
    assert all(plan.state is not None for plan in ranks.plans[1:] if not plan.boundary)
    return {
        "seconds": min(step["at"] for step in after) - ends,
        "lost": before + 1 - min(step["iteration"] for step in after),
        "difference": max(proof.gradient_differences(out, reference, ITERATIONS, SIZE, relative=True).values()),
    }


def nodes(runs: int) -> dict[str, dict[str, float]]:
    """By case: median seconds, and the largest of the rest. Prints them with their marks."""
    found = {}
    with tempfile.TemporaryDirectory(prefix="unicron-bench-", dir="/dev/shm") as folder:
        reference = Path(folder, "reference")
        train(reference, [])
        for number, (case, killed) in enumerate(CASES.items()):
            each = [measured(Path(folder, f"{number}.{run}"), reference, killed) for run in range(runs)]
            found[case] = {
                "seconds": statistics.median(run["seconds"] for run in each),
                "lost": max(run["lost"] for run in each),
                "difference": max(run["difference"] for run in each),
            }
    print("DP2 x TP2, a distributed optimizer, no file to go on from:")
    for case, row in found.items():
        print(f"  {case}: {row['seconds']:.2f} s to the next step, {row['lost']:.0f} iterations lost")
        print_figure(f"{case}: largest difference of a gradient, 1e-6", 1e6 * row["difference"], "", 1)
    return found
