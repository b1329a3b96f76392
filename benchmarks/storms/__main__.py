"""``python -m benchmarks.storms [--only NAME]``: one storm after the other on a cluster with real links.

Each row prints whether it passed, its figures, and the goals that it missed. A row that takes too long has failed, and
the next one gets a new cluster. The files of failed rows stay. Needs root, Slurm, iproute2 and nftables. Exit status 1
if a row failed.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.storms.rows import Row, rows
from benchmarks.storms.stage import OUT_OF_SERVICE, Storm
from tests.support.links import LinksCluster
from tests.support.processes import wait_for
from unicron_ctl.shared.system.errors import UserError, one_line

NODES = 4
CLEAN_LIMIT = 45.0  # seconds until all jobs are gone and all nodes serve again; else there is a new cluster
# The ranks share this machine's cores: an iteration takes many times as long while another rank starts.
SETTINGS = "hang_floor_seconds = 5.0\n"
SLURM_LINES = ["SlurmdTimeout=300"]  # as on a site; with the local cluster's 20 s Slurm itself sets silent nodes down


class TooLong(Exception):
    """A row has used up its time."""


@dataclass
class Result:
    """The result of a row."""

    row: Row
    seconds: float
    seen: dict[str, str]
    wrong: list[str] = field(default_factory=list)
    error: str = ""
    """Why it did not come to its end."""

    @property
    def passed(self) -> bool:
        return not self.wrong and not self.error

    def line(self) -> str:
        """Return the line to print."""
        parts = ", ".join(f"{name} {value}" for name, value in self.seen.items())
        missed = "; ".join(filter(None, [*self.wrong, self.error]))
        text = f"{parts}   MISSED: {missed}" if missed else parts
        return f"{'pass' if self.passed else 'FAIL'}  {self.row.name:<16}{self.seconds:>5.0f} s  {text}"


class Sites:
    """One cluster for all rows, or a new one if it cannot be cleaned."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._count = folder, 0
        self._site: LinksCluster | None = None

    def fresh(self) -> LinksCluster:
        """Return a cluster on which nothing runs, with a new controller."""
        if self._site is not None:
            try:
                _clean(self._site)
                return self._site
            except (AssertionError, UserError, OSError) as error:
                print(f"      a new cluster: {short(error, 100)}", flush=True)
                self.close()
        self._count += 1
        folder = self._folder / f"site{self._count}"
        self._site = LinksCluster(folder, NODES, SETTINGS, config_lines=SLURM_LINES)
        return self._site

    def close(self) -> None:
        """End the cluster; its files stay."""
        site, self._site = self._site, None
        if site is not None:
            try:
                site.close()
            except (AssertionError, UserError) as error:  # a unicrond that does not end by itself, a busy machine
                print(f"      {short(error, 100)}", flush=True)


def short(error: BaseException, most: int) -> str:
    """Return the first characters of an error's text, without the state at that time."""
    return one_line(str(error)).partition("; now:")[0][:most]


def _clean(site: LinksCluster) -> None:
    """Remove all faults and jobs, and bring all nodes into service. Raises AssertionError if that fails."""
    site.heal()
    site.controller.kill()
    for node in site.cluster.spec.node_names:
        site.cluster.power_on(node)

    def clean() -> bool:
        jobs = {word.split("_")[0] for word in site.slurm("squeue", "-h", "-o", "%i", check=False).split()}
        if jobs:  # again and again: scancel misses jobs that Slurm requeues meanwhile
            site.slurm("scancel", *jobs, check=False)
        for node, states in site.nodes().items():
            if states & OUT_OF_SERVICE:
                site.slurm("scontrol", "update", f"node={node}", "state=resume", check=False)
        return not jobs and site.clean()

    wait_for(clean, "a clean cluster", CLEAN_LIMIT, site.nodes)
    site.controller.forget()
    site.controller.start()


@contextlib.contextmanager
def _time_limit(seconds: float) -> Iterator[None]:
    """Raise TooLong in the main thread after so many seconds, wherever it waits."""

    def ring(*_: object) -> None:
        raise TooLong(f"not through after {seconds:.0f} s")

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)


def play(row: Row, sites: Sites) -> Result:
    """Play one row."""
    began = time.monotonic()
    storm: Storm | None = None
    error = ""
    try:
        with _time_limit(row.limit):
            storm = Storm(sites.fresh())
            row.play(storm)
    except Exception as problem:  # the other rows must be played, whatever this is
        error = f"{type(problem).__name__}: {short(problem, 200)}"
        if isinstance(problem, TooLong):
            sites.close()
    seen, wrong = (storm.seen, storm.wrong) if storm else ({}, [])
    return Result(row, time.monotonic() - began, seen, wrong, error)


def summary(results: list[Result]) -> str:
    """Return the table of all rows."""
    lines = [f"{'':6}{'row':<16}{'what':<72}{'goal'}"]
    for result in results:
        state, row = "pass" if result.passed else "FAIL", result.row
        lines.append(f"{state:<6}{row.name:<16}{row.what:<72}{row.goal}")
    return "\n".join([*lines, f"{sum(result.passed for result in results)} of {len(results)} rows passed"])


def main(arguments: list[str] | None = None) -> int:
    """Return 0 if all rows have passed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.storms", description=__doc__.splitlines()[0])
    parser.add_argument("--only", action="append", metavar="NAME", help="this row; may be repeated (head: all head-*)")
    parser.add_argument("--list", action="store_true", help="name the rows and their goals")
    parser.add_argument("--loss-seconds", type=float, default=60.0, help="time of lost packets (a release: 600)")
    parser.add_argument("--kills", type=int, default=40, help="kills of unicrond (a release: 200)")
    parser.add_argument("--soak-seconds", type=float, default=120.0, help="time of the soak (a release: 1800)")
    parser.add_argument("--seed", type=int, default=1, help="of the soak")
    options = parser.parse_args(arguments)
    table = rows(options.loss_seconds, options.kills, options.soak_seconds, options.seed)
    chosen = [row for row in table if not options.only or {row.name, row.name.rpartition("-")[0]} & set(options.only)]
    if not chosen:
        parser.error(f"no such row: choose from {', '.join(row.name for row in table)}")
    if options.list:
        print("\n".join(f"{row.name:<16}{row.what:<72}{row.goal}" for row in chosen))
        return 0
    if os.getuid():
        parser.error("links of their own need root")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # ends the cluster, too
    folder = Path(tempfile.mkdtemp(prefix="unicron-storms-"))
    with contextlib.closing(Sites(folder)) as sites:
        results = []
        for row in chosen:
            results.append(play(row, sites))
            print(results[-1].line(), flush=True)
    print("\n" + summary(results))
    if all(result.passed for result in results):
        shutil.rmtree(folder, ignore_errors=True)
        return 0
    print(f"logs: {folder}")
    return 1


if __name__ == "__main__":
    sys.exit(main())
