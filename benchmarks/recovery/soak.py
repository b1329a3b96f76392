"""``python -m benchmarks.recovery.soak --minutes 5``: ranks are killed at random moments, run after run.

Every ledger is checked. A run that fails leaves its seed: ``--seed N --runs 1`` repeats its schedule (the moments are
as exact as the machine).
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
import traceback
from collections import Counter
from pathlib import Path

from tests.support import proof
from tests.support.rank_harness import Ranks

SIZE = 4
ITERATIONS = 12
AT = ("fetch", "backward", "reduce", "reduced", "step", "enter", "world", "entered", "transfer")
TOLERANCE = 1e-4  # on losses around 5: the order of sums changes with the members, and Adam passes it on


def schedule(draw: random.Random) -> dict:
    """Keywords of one run: faults at drawn points, kills at drawn times, at most three of four ranks at once."""
    restart = draw.random() < 0.4
    count = draw.choice([1, 1, 2, 2, 3])
    victims = draw.sample(range(SIZE), count)
    faults, kills = [], []
    for slot in victims:
        if draw.random() < 0.4:
            kills.append((draw.uniform(0.0, 1.0), slot))
            continue
        iteration = draw.choice([-1, 0, 0, 1, 2, 3, 3])
        at = draw.choice(AT[:-1]) if iteration >= 0 else draw.choice(("enter", "world", "entered", "transfer"))
        kind = draw.choices(("kill", "late", "error", "gloo", "hang"), (4, 4, 2, 1, 1))[0]
        if kind == "error" and at in ("fetch", "backward", "step"):
            kind = "kill"  # there it would be the script's own error
        faults.append(
            {
                "slot": slot,
                "iteration": iteration,
                "at": at,
                "count": draw.randrange(3) if at in AT[:4] else 0,
                "kind": kind,
                "delay": draw.choice((0.0005, 0.002, 0.01, 0.03)),
            }
        )
        if restart and draw.random() < 0.3:
            faults.append(
                {
                    "slot": slot,
                    "incarnation": 1,
                    "iteration": -1,
                    "at": "transfer",
                    "count": 0,
                    "kind": draw.choice(("kill", "late")),
                    "delay": draw.choice((0.0005, 0.002)),
                }
            )
    leave = {draw.randrange(SIZE): draw.randrange(3)} if draw.random() < 0.2 else None
    return {
        "faults": faults,
        "kills": kills,
        "restart": restart,
        "leave": leave,
        "comeback": draw.random() < 0.5,
        "hang_limit": 0.7,
        "TINY_OVERLAP": draw.choice("01"),
        "TINY_ITERATIONS": str(ITERATIONS if not restart else 3 * ITERATIONS),
    }


def run(keywords: dict, reference: dict[int, set[float]]) -> tuple[str, Ranks]:
    """One run and its proof. Raises AssertionError for a broken promise."""
    with tempfile.TemporaryDirectory(prefix="unicron-soak-") as folder:
        keywords = dict(keywords)
        ranks = Ranks(Path(folder), SIZE, keywords.pop("faults"), fork=True, TINY_SAVE="0", **keywords)
        ranks.drive()
        iterations = int(keywords["TINY_ITERATIONS"])
        if not any(step["iteration"] == iterations - 1 for step in ranks.steps):
            assert not any(codes[-1] == 0 for codes in ranks.exits.values()), "finished early"
            return "all lost", ranks
        proof.nothing_thrown_away(ranks)
        if not ranks.reformed:
            proof.exactly_once(ranks, iterations)
        for iteration, values in proof.losses(Path(folder)).items():
            wanted = next(iter(reference[iteration]))
            assert all(abs(value - wanted) <= TOLERANCE for value in values), (iteration, values, wanted)
        return "healed" if ranks.breaks else "undisturbed", ranks


def undisturbed() -> dict[int, set[float]]:
    """The losses of a run in which nothing fails."""
    with tempfile.TemporaryDirectory(prefix="unicron-soak-") as folder:
        Ranks(Path(folder), SIZE, [], fork=True, TINY_SAVE="0", TINY_ITERATIONS=str(3 * ITERATIONS)).drive()
        return proof.losses(Path(folder))


def main() -> int:
    parser = argparse.ArgumentParser("python -m benchmarks.recovery.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=5.0, help="how long")
    parser.add_argument("--runs", type=int, default=1_000_000, help="at most so many")
    parser.add_argument("--seed", type=int, default=None, help="of the first run; drawn when not given")
    options = parser.parse_args()
    until = time.monotonic() + 60 * options.minutes
    seed = options.seed if options.seed is not None else random.randrange(1_000_000)
    reference, outcomes, slow = undisturbed(), Counter(), []
    for number in range(options.runs):
        if time.monotonic() > until:
            break
        keywords, began = schedule(random.Random(seed + number)), time.monotonic()
        try:
            outcome, ranks = run(keywords, reference)
            slow.append((round(max(ranks.rests, default=0.0), 2), seed + number))
        except Exception:
            outcome = "FAILED"
            print(f"seed {seed + number}: {keywords}\n{traceback.format_exc()[-6000:]}", flush=True)
        outcomes[outcome] += 1
        if time.monotonic() - began > 15:
            print(f"seed {seed + number}: {outcome} after {time.monotonic() - began:.1f} s: {keywords}", flush=True)
    print(
        f"{sum(outcomes.values())} runs from seed {seed}: {dict(outcomes)}; slowest break to plan: {sorted(slow)[-3:]}"
    )
    return 1 if outcomes["FAILED"] else 0


if __name__ == "__main__":
    sys.exit(main())
