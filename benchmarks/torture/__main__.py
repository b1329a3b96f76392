"""``python -m benchmarks.torture``: two jobs on one Slurm cluster, a failure every few seconds, proofs at the end.

Ctrl-C and SIGTERM end it cleanly, and ``--resume`` goes on, from the jobs' last checkpoints, as it does after a power
failure of the machine. Exit status: 1 when anything was not as promised, 130 when it was interrupted (docs/torture.md).
"""

from __future__ import annotations

import argparse
import datetime
import json
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.report import commit, machine
from benchmarks.torture import leaks, progress, proof, schedule
from benchmarks.torture.deeds import refused
from benchmarks.torture.progress import Leg, Progress
from benchmarks.torture.run import Defect, Run, Stopped
from benchmarks.torture.stage import CHECKPOINTS, ELEMENTS, KEEP_MINUTES, NODES, TRAININGS, Site, end_leftovers
from unicron_ctl.lab.cluster.cluster_layout import default_state_dir
from unicron_ctl.shared.system.errors import WRONG_USE, UserError, one_line

INTERRUPTED = 130
FINISHED, PROVEN = "finished", "proven"
TIDY_LIMIT = 150.0  # seconds until all files of a job must be gone
SPARE = 15.0  # seconds: find(1) counts whole minutes
LOOK = 60.0  # seconds between two lines about the undisturbed trainings


def arguments(words: list[str] | None) -> argparse.Namespace:
    """Return the command's options."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.torture", description=__doc__.splitlines()[0])
    parser.add_argument("--failures", type=int, default=1200, help="how many (default 1200; the short form: 60)")
    parser.add_argument("--every", type=float, default=5.0, help="seconds between two, at least (default 5)")
    parser.add_argument("--seed", type=int, default=None, help="of the schedule; drawn when not given")
    parser.add_argument(
        "--folder", type=Path, default=default_state_dir().parent / "torture", help="default %(default)s"
    )
    parser.add_argument("--resume", action="store_true", help="go on with the run in that folder")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there")
    options = parser.parse_args(words)
    if options.failures < 1 or options.every < 0:
        parser.error("--failures is at least 1, --every at least 0 seconds")
    if options.json and not options.json.resolve().parent.is_dir():
        parser.error(f"{options.json}: no such folder; make it or choose another")
    options.folder = options.folder.expanduser().resolve()
    return options


def open_run(options: argparse.Namespace) -> tuple[Progress, dict[str, str]]:
    """Return the run to begin or to resume, and the reason for each kind that is left out. Raises UserError."""
    if options.resume:
        found = progress.load(options.folder)
        left_out = refused(tuple(found.kinds))
        if left_out:
            raise UserError(f"this machine cannot do {', '.join(left_out)}: resume the run where it began")
        if found.legs and found.legs[-1].ended == PROVEN:
            raise UserError(f"the run in {options.folder} is over: begin a new one in another --folder", WRONG_USE)
        return found, {}
    if (options.folder / progress.FILE).exists():
        path = options.folder
        raise UserError(f"{path} holds a run: go on with --resume, name another --folder, or remove it", WRONG_USE)
    try:
        options.folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        why = f"{options.folder} cannot be made ({error.strerror})"
        raise UserError(f"{why}: name another --folder", WRONG_USE) from None
    left_out = refused(tuple(schedule.KINDS))
    kinds = [kind for kind in schedule.KINDS if kind not in left_out]
    seed = options.seed if options.seed is not None else random.randrange(1_000_000)
    return Progress(seed, options.failures, options.every, kinds), left_out


class Torture:
    """A run from its beginning, or from its interruption, to the report."""

    def __init__(self, options: argparse.Namespace):
        self.options, self.folder = options, options.folder
        self.progress, self.left_out = open_run(options)
        self.stopping = False
        self.began = time.monotonic()

    def stop(self, *_: object) -> None:
        """Handle a signal: end the run, the second time at once."""
        if self.stopping:
            raise KeyboardInterrupt
        self.stopping = True

    def tell(self, text: str) -> None:
        """Print a line with the seconds since the start."""
        print(f"{time.monotonic() - self.began:7.1f} s  {text}", flush=True)

    def save(self) -> None:
        going = not (self.progress.legs and self.progress.legs[-1].ended in (FINISHED, PROVEN))
        self.progress.save(self.folder, time.time() if going else 0.0)

    def run(self) -> int:
        """Return the exit status."""
        run = self.progress
        end_leftovers(self.folder)
        try:
            left = "".join(f"; left out: {kind}: {why}" for kind, why in self.left_out.items())
            self.tell(f"{run.failures} failures of {len(run.kinds)} kinds, seed {run.seed}, in {self.folder}{left}")
            if not (run.legs and run.legs[-1].ended == FINISHED):
                self._leg()
            order = self._undisturbed()
        except Stopped:
            print(f"interrupted after {run.position} failures: go on with --resume --folder {self.folder}")
            return INTERRUPTED
        except (Defect, UserError, AssertionError, RuntimeError, subprocess.SubprocessError) as defect:
            text = one_line(str(defect))[:500]
            print(f"DEFECT: {text}; the logs are in {self.folder}")
            run.wrong.append(text)
            run.legs[-1].ended = "defect"
            self.save()
            return 1
        return self._report(order)

    def _leg(self) -> None:
        """Start the cluster, play the rest of the schedule, and end the cluster."""
        run = self.progress
        run.legs.append(Leg(time.time()))
        self.save()
        number = len(run.legs) - 1
        if number:
            self.tell("resumed: the cluster is started again, and the jobs go on from their last checkpoints")
        folder = self.folder / f"leg{number}"
        folder.mkdir()
        self.tell(f"starting slurmctld, {NODES} slurmd and unicrond in {folder}")
        site = Site(folder, self.folder / CHECKPOINTS)
        try:
            before = site.inventory()
            part = Run(site, run, self.tell, lambda: self.stopping, self.save)
            try:
                part.play()
                part.end()
                self._leaks(site, part, before)
            except Stopped:
                run.legs[-1].ended = "interrupted"
                raise
            finally:
                self._judge(site, part)
                self.save()
        finally:
            site.close()

    def _judge(self, site: Site, part: Run) -> None:
        """Add a leg's leaks, checkpoints read and ledger violations, however it ended."""
        run = self.progress
        grown = leaks.growth(part.samples)
        run.lives = {what: run.lives.get(what, 0) + grown.lives.get(what, 0) for what in leaks.WHAT}
        run.wrong += [f"grows: {what}" for what in grown.found]
        run.legs[-1].read = {name: site.reads(name) for name in ELEMENTS}
        for name, job in part.jobs.items():
            if job.violations:
                run.wrong.append(f"{name}: {job.violations} violations of the ledger")

    def _leaks(self, site: Site, part: Run, before: leaks.Inventory) -> None:
        """Add what the jobs have left, after another job has run on each node."""
        passed, deadline = False, time.monotonic() + TIDY_LIMIT
        while (found := leaks.leaked(before, site.inventory())) and time.monotonic() < deadline:
            part.turn()
            if not passed and deadline - time.monotonic() < TIDY_LIMIT - 60.0 * KEEP_MINUTES - SPARE:
                passed = True
                site.pass_by()
        self.progress.wrong += [f"left: {what}" for what in found]

    def _undisturbed(self) -> float:
        """Run the same trainings without a fault. Raises Stopped."""
        last = {t.name: -1 for t in TRAININGS}
        for number in range(len(self.progress.legs)):
            for name in last:
                steps = proof.steps_of(self.folder / f"leg{number}" / name)
                last[name] = max([last[name], *(step["iteration"] for step in steps)])
        self.tell("the same trainings without a fault")
        printed = time.monotonic()

        def look(done: int) -> None:
            nonlocal printed
            if self.stopping:
                raise Stopped
            if time.monotonic() > printed + LOOK:
                printed = time.monotonic()
                self.tell(f"{done} of {sum(last.values()) + len(last)} undisturbed iterations")

        return proof.run_undisturbed(self.folder, last, look)

    def _report(self, order: float) -> int:
        run, jobs = self.progress, []
        for training in TRAININGS:
            figures, wrong = proof.of_job(self.folder, run, training)
            jobs.append(figures)
            run.wrong += wrong
        unseen = [what for what in leaks.WHAT if not run.lives.get(what)]
        run.wrong += [f"no {what} lived long enough to be judged for growth: ask for more failures" for what in unseen]
        result = _about(run) | {"jobs": jobs, "order_alone": order, "wrong": run.wrong}
        run.legs[-1].ended = PROVEN
        self.save()
        if self.options.json:
            self.options.json.write_text(json.dumps(result, indent=1) + "\n")
        print(table(result))
        return int(bool(run.wrong))


def _about(run: Progress) -> dict[str, Any]:
    return {
        "date": datetime.date.today().isoformat(),
        "commit": commit(),
        "machine": machine(),
        "seed": run.seed,
        "failures": len(run.inflicted),
        "refused": len(run.done) - len(run.inflicted),
        "lives": run.lives,
        "legs": len(run.legs),
        "hours": sum(leg.seconds for leg in run.legs) / 3600,
        "moves": run.moves,
        "formed_anew": run.formed_anew,
        "kinds": proof.healing(run),
    }


def table(result: dict[str, Any]) -> str:
    """Return the results for people."""
    lines = [f"{'fault':<24}{'times':>6}{'sound again, median s':>24}{'at most':>10}"]
    for kind, of in result["kinds"].items():
        shown = [f"{of[key]:.1f}" if of[key] is not None else "" for key in ("sound_after_median", "sound_after_most")]
        lines.append(f"{kind:<24}{of['count']:>6}{shown[0]:>24}{shown[1]:>10}")
    for job in result["jobs"]:
        lines.append(
            f"{job['name']}: {job['iterations']} iterations, {job['faults']} faults, loss {job['first_loss']:.3f} to "
            f"{job['last_loss']:.3f}; largest difference from the undisturbed run {job['largest']:.1e} (iteration "
            f"{job['where']}; the order of sums alone: {result['order_alone']:.1e}; at most {proof.TOLERANCE:g})"
        )
    judged = " and ".join(f"{count} lives of {what}" for what, count in result["lives"].items())
    lines.append(f"{result['refused']} refused failures do not count; judged for growth: {judged}")
    lines.append(
        f"{result['failures']} failures in {result['hours']:.2f} h, {result['moves']} moves of nodes between the jobs, "
        f"seed {result['seed']}, commit {result['commit']}, {result['machine']}, {result['date']}"
    )
    lines += [f"WRONG: {what}" for what in result["wrong"]]
    return "\n".join([*lines, "FAILED" if result["wrong"] else "passed"])


def main(words: list[str] | None = None) -> int:
    """Return the exit status."""
    options = arguments(words)
    try:
        torture = Torture(options)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, torture.stop)
        return torture.run()
    except UserError as error:
        print(f"torture: {one_line(str(error))}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
