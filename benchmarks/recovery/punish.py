"""``python -m benchmarks.recovery.punish --minutes 5``: `unicronctl punish` against a real job, its losses compared
with those of a run in which nothing fails.

Real unicrond, three agents and ranks on this machine, without Slurm. Exits with 1 when a micro-batch was counted twice
or not at all, when members report different losses, or when the job does not train on in the end.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from statistics import median

from tests.support import proof
from tests.support.jobs import FOREVER, World, undisturbed
from tests.support.processes import ROOT, UNICRONCTL

NODES = 3
FAULTS = (
    "rank-kill,exception:python,exception:cuda,exception:ecc,exception:nccl,exception:connection-reset,"
    "exception:file-system,hang-stop,hang-gil,slow:1.5,oom,oom-kill,full-disk,lost-network,black-hole,"
    "corrupt-message,corrupt-checkpoint,corrupt-checkpoint"
)
SETTINGS = "allow_inject = true\nhang_floor_seconds = 2.0\n"
CLOSE = 1e-4  # losses of about 5 in fp32: other members add the same micro-batches in another order


def reference(folder: Path, iterations: int) -> dict[int, set[float]]:
    """The losses of one undisturbed process."""
    if undisturbed(folder, iterations).wait():
        raise RuntimeError(f"the undisturbed run failed:\n{(folder / 'log').read_text()[-3000:]}")
    return proof.losses(folder)


def punish(job: World, options: argparse.Namespace) -> list[dict]:
    """The injected faults."""
    command = [*UNICRONCTL, "punish", "--json", "--controller", job.address]
    command += ["--mtbf", str(options.mtbf), "--minutes", str(options.minutes), "--seed", str(options.seed)]
    done = subprocess.run(
        [*command, "--faults", options.faults], check=True, text=True, stdout=subprocess.PIPE, cwd=ROOT
    )
    return [json.loads(line) for line in done.stdout.splitlines()]


def main() -> int:
    parser = argparse.ArgumentParser("python -m benchmarks.recovery.punish", description=__doc__)
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--mtbf", type=float, default=10.0, help="seconds")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--faults", default=FAULTS)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="unicron-punish-") as name:
        folder = Path(name)
        tiny = {"TINY_ITERATIONS": FOREVER, "TINY_SLOW": "0.05"}
        with World(folder, NODES, SETTINGS, **tiny) as job:
            job.wait(lambda: job.trains(range(NODES), 15), "the first iterations", 300)
            injected = punish(job, options)
            at = job.job()["iteration"]
            job.wait(lambda: job.job()["iteration"] > at + 5, "it trains on", 200)
            state, failures = job.job(), job.events("failure_detected")
            recoveries = [f["stepped_at"] - f["detected_at"] for f in job.failures() if f["stepped_at"]]
        (folder / "reference").mkdir()
        seen = proof.losses(folder)
        wanted = reference(folder / "reference", max(seen) + 1)
    apart = {i: abs(next(iter(seen[i])) - next(iter(wanted[i]))) for i in sorted(seen)}
    split = [i for i, values in seen.items() if len(values) > 1]
    missing = sorted(set(range(max(seen) + 1)) - set(seen))
    far = [i for i, distance in apart.items() if distance > CLOSE]
    print(f"injected {len(injected)}: {dict(Counter(item['fault'] for item in injected))}")
    print(f"failures {len(failures)}: {dict(Counter(failure['cause'] for failure in failures))}")
    print(f"iterations {state['iteration'] + 1}, generations {state['generation']}, members {state['members']}")
    if recoveries:
        print(f"fault seen to next step, s: median {median(recoveries):.2f}, longest {max(recoveries):.2f}")
    print(f"ledger violations {state['ledger_violations']}, members that differ {len(split)}, missing {len(missing)}")
    print(f"loss against the reference: largest difference {max(apart.values()):.2e}, over {CLOSE:g}: {len(far)} times")
    return int(bool(state["ledger_violations"] or split or missing or state["ended"]))


if __name__ == "__main__":
    sys.exit(main())
