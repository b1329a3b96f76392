"""A rank of an unmodified script hangs: seconds until the job's next step, under Unicron and under torchrun.

    python -m benchmarks.plain_hang [--hangs sleep,deadlock,backward,stop,spin] [--step 0.1] [--short 30] [--limit 60]
        [--rounds 1] [--ft-launcher PROGRAM]

The script (`tests/support/plain_hang.py`) is torch's DistributedDataParallel over gloo with four ranks; it knows
neither. Unicron has a real unicrond and two real agents with two ranks each, with its usual settings and torch's
default time-out of 30 minutes. torchrun runs it with that time-out, for which only `--limit` seconds are waited, and
with a short one, for which the script has to be changed; so does NVRx's ft_launcher where it is named. The systems take
turns.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from tests.support.controller import Controller
from tests.support.jobs import HERE, Job
from tests.support.processes import outside_slurm

SCRIPT = HERE / "plain_hang.py"
BEGIN_SECONDS = 120.0  # until the script hangs
END_SECONDS = 10.0
Start = Callable[[Path, dict[str, str]], contextlib.AbstractContextManager[None]]


@contextlib.contextmanager
def unicron(folder: Path, settings: dict[str, str]) -> Iterator[None]:
    """The script as a job of two nodes."""
    (folder / "controller").mkdir()
    (folder / "job").mkdir()
    controller = Controller(folder / "controller")
    nodes = {"UNICRON_RANKS_PER_NODE": "2", "UNICRON_MIN_NODES": "2"}
    job = Job(folder / "job", controller.address, "1", 2, [sys.executable, str(SCRIPT)], **settings, **nodes)
    try:
        yield
    finally:
        job.close()
        controller.close()


@contextlib.contextmanager
def launched(command: Sequence[str], folder: Path, settings: dict[str, str]) -> Iterator[None]:
    """The same ranks under a launcher, which starts all again when one fails.

    Its ranks get a new store at each start: in the one that torchrun shares by default they find the dead world's
    addresses, and never come back.
    """
    options = ["--standalone", "--nproc-per-node=4", "--max-restarts=3", str(SCRIPT)]
    environment = {**outside_slurm(), **settings, "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    with open(folder / "log", "w") as log:
        process = subprocess.Popen([*command, *options], env=environment, stdout=log, stderr=log)
    try:
        yield
    finally:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(END_SECONDS)
        process.kill()
        process.wait()


def next_step(out: Path, limit: float) -> float | None:
    """Seconds from the beginning of the hang to a step of rank 0's next process; None after `limit`.

    Raises TimeoutError for a script that does not get so far.
    """
    begun = time.monotonic()
    while not (out / "hung").exists() or not (out / "hung").read_text():
        if time.monotonic() - begun > BEGIN_SECONDS:
            raise TimeoutError("the script has not hung yet")
        time.sleep(0.05)
    hung = float((out / "hung").read_text())
    while time.time() - hung < limit:
        steps = [line.split() for line in (out / "steps").read_text().splitlines() if line.count(" ") == 2]
        if after := [float(at) for _, at, pid in steps if pid != steps[0][2] and float(at) > hung]:
            return after[0] - hung
        time.sleep(0.05)
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hangs", default="sleep,deadlock,backward,stop")
    parser.add_argument("--step", type=float, default=0.1)
    parser.add_argument("--short", type=float, default=30.0, help="seconds of the short time-out")
    parser.add_argument("--limit", type=float, default=60.0, help="seconds that are waited for a next step")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--ft-launcher", metavar="PROGRAM", help="NVRx's, in an environment with a torch of its own")
    options = parser.parse_args()
    launchers = {"torchrun": [sys.executable, "-m", "torch.distributed.run"]}
    if options.ft_launcher:
        launchers["ft_launcher"] = [options.ft_launcher, "--ft-ignore-missing-cfg"]
    systems: dict[str, tuple[Start, dict[str, str]]] = {"unicron, default time-out": (unicron, {})}
    for name, command in launchers.items():
        start: Start = functools.partial(launched, command)
        systems[f"{name}, time-out of {options.short:g} s"] = start, {"PLAIN_TIMEOUT": str(options.short)}
        systems[f"{name}, default time-out"] = start, {}
    print(f"| hang, steps of {options.step:g} s | {' | '.join(systems)} |\n|{'---|' * (len(systems) + 1)}", flush=True)
    for hang in options.hangs.split(",") * options.rounds:
        cells = []
        for begin, more in systems.values():
            with tempfile.TemporaryDirectory(prefix="unicron-bench-") as name:
                out = Path(name) / "out"
                out.mkdir()
                settings = {"PLAIN_OUT": str(out), "PLAIN_HANG": hang, "PLAIN_STEP": str(options.step), **more}
                with begin(Path(name), settings):
                    seconds = next_step(out, options.limit)
            cells.append(f"{seconds:.1f} s" if seconds is not None else f"over {options.limit:g} s")
        print(f"| {hang} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
