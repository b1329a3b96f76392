"""``python -m benchmarks.storms [--only NAME]``: a cluster with real links, and one storm after the other on it.

Each row prints pass or fail, what was seen, and what was asked and not seen. A row that takes too long has failed, and
the next one gets a cluster of its own. Needs root, Slurm, iproute2 and nftables. Exit status 1 when a row failed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.storms.rows import Row, rows
from benchmarks.storms.stage import OUT_OF_SERVICE, Storm
from tests.support.links import LinksCluster
from tests.support.processes import wait_for
from unicron_ctl.shared.system.errors import UserError, one_line

NODES = 4
CLEAN_LIMIT = 45.0  # seconds for all jobs to be gone and all nodes to serve again; else a new cluster
# The ranks share this machine's cores: an iteration takes many times as long while another rank starts.
SETTINGS = "hang_floor_seconds = 5.0\n"


class TooLong(Exception):
    """A row has used up its time."""


@dataclass
class Result:
    """The result of a row. `error`: it could not be played to its end."""

    row: Row
    seconds: float
    seen: dict[str, str]
    wrong: list[str] = field(default_factory=list)
    error: str = ""

    @property
    def passed(self) -> bool:
        return not self.wrong and not self.error

    def line(self) -> str:
        """For the table."""
        parts = [f"{name} {value}" for name, value in self.seen.items()]
        missed = [*self.wrong, *([self.error] if self.error else [])]
        said = ", ".join(parts) + (f"   MISSED: {'; '.join(missed)}" if missed else "")
        return f"{'pass' if self.passed else 'FAIL'}  {self.row.name:<16}{self.seconds:>5.0f} s  {said}"

    def record(self) -> dict[str, Any]:
        """For --json."""
        names = {"name": self.row.name, "what": self.row.what, "asked": self.row.asked}
        return names | {"passed": self.passed, "seen": self.seen, "missed": self.wrong, "error": self.error}


class Sites:
    """One cluster for all rows, or another where it could not be made clean."""

    def __init__(self, folder: Path, slurmd_timeout: int) -> None:
        self._folder, self._slurmd_timeout, self._count = folder, slurmd_timeout, 0
        self._site: LinksCluster | None = None

    def fresh(self) -> LinksCluster:
        """A cluster on which nothing runs, and a controller that knows nothing."""
        if self._site is not None:
            try:
                _clean(self._site)
                return self._site
            except (AssertionError, UserError, OSError) as error:
                print(f"      a new cluster: {one_line(str(error)).partition('; now:')[0][:100]}", flush=True)
                self.close()
        self._count += 1
        # As on a site: what the local cluster has by default lets Slurm itself set silent nodes down after 20 s.
        lines = [f"SlurmdTimeout={self._slurmd_timeout}"]
        folder = self._folder / f"site{self._count}"
        self._site = LinksCluster(folder, NODES, SETTINGS, config_lines=lines)
        return self._site

    def close(self) -> None:
        """Nothing of it runs any more. Its files stay."""
        site, self._site = self._site, None
        if site is not None:
            try:
                site.close()
            except (AssertionError, UserError) as error:  # a unicrond that does not end by itself, a busy machine
                print(f"      {one_line(str(error)).partition('; now:')[0][:100]}", flush=True)


def _clean(site: LinksCluster) -> None:
    """No fault, no job, all nodes in service. Raises AssertionError when that does not come."""
    site.heal()
    site.controller.kill()
    for node in site.cluster.spec.node_names:
        site.cluster.power_on(node)

    def clean() -> bool:
        jobs = {word.split("_")[0] for word in site.slurm("squeue", "-h", "-o", "%i", check=False).split()}
        if jobs:  # again and again: what Slurm requeues meanwhile is not cancelled
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
    """Raises TooLong in the main thread, wherever it waits."""

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
    """Runs one row."""
    began = time.monotonic()
    storm: Storm | None = None
    error = ""
    try:
        with _time_limit(row.limit):
            storm = Storm(sites.fresh())
            row.play(storm)
    except Exception as problem:  # whatever it is, the other rows are to be seen
        told = one_line(str(problem)).partition("; now:")[0][:200]
        error = f"{type(problem).__name__}: {told}"
        if isinstance(problem, TooLong):
            sites.close()
    seen, wrong = (storm.seen, storm.wrong) if storm else ({}, [])
    return Result(row, time.monotonic() - began, seen, wrong, error)


def summary(results: list[Result]) -> str:
    """The table of all rows."""
    lines = [f"{'':6}{'row':<16}{'what':<72}{'asked'}"]
    for result in results:
        lines.append(
            f"{'pass' if result.passed else 'FAIL':<6}{result.row.name:<16}{result.row.what:<72}{result.row.asked}"
        )
    return "\n".join([*lines, f"{sum(result.passed for result in results)} of {len(results)} rows passed"])


def main(arguments: list[str] | None = None) -> int:
    """0 when all rows have passed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.storms", description=__doc__.splitlines()[0])
    parser.add_argument("--only", action="append", metavar="NAME", help="this row; may be repeated (head: all head-*)")
    parser.add_argument("--list", action="store_true", help="name the rows and what they ask")
    parser.add_argument("--loss-seconds", type=float, default=60.0, help="how long packets are lost (a release: 600)")
    parser.add_argument("--kills", type=int, default=40, help="how often unicrond is killed (a release: 200)")
    parser.add_argument("--soak-seconds", type=float, default=120.0, help="how long the soak goes on (a release: 1800)")
    parser.add_argument("--seed", type=int, default=1, help="of what the soak draws")
    parser.add_argument("--slurmd-timeout", type=int, default=300, help="slurm.conf's SlurmdTimeout, seconds")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there")
    parser.add_argument("--keep", action="store_true", help="keep all logs, and say where they are")
    options = parser.parse_args(arguments)
    table = rows(options.loss_seconds, options.kills, options.soak_seconds, options.seed)
    chosen = [row for row in table if not options.only or {row.name, row.name.rpartition("-")[0]} & set(options.only)]
    if not chosen:
        parser.error(f"no such row: choose from {', '.join(row.name for row in table)}")
    if options.list:
        print("\n".join(f"{row.name:<16}{row.what:<72}{row.asked}" for row in chosen))
        return 0
    if os.getuid():
        parser.error("links of their own need root")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that its cluster goes with it
    results = run(chosen, options.slurmd_timeout, options.keep)
    print("\n" + summary(results))
    if options.json:
        options.json.write_text(json.dumps([result.record() for result in results], indent=1) + "\n")
    return 0 if all(result.passed for result in results) else 1


def run(chosen: list[Row], slurmd_timeout: int, keep: bool) -> list[Result]:
    """Plays the rows and prints each line when it is known."""
    folder = Path(tempfile.mkdtemp(prefix="unicron-storms-"))
    sites, results = Sites(folder, slurmd_timeout), []
    try:
        for row in chosen:
            results.append(play(row, sites))
            print(results[-1].line(), flush=True)
    finally:
        sites.close()
        if keep:
            print(f"logs: {folder}")
        else:
            shutil.rmtree(folder, ignore_errors=True)
    return results


if __name__ == "__main__":
    sys.exit(main())
