"""What an agent writes into the job's log."""

from __future__ import annotations

from collections import Counter

from unicron_ctl.agent.connections.job_environment import Place
from unicron_ctl.shared.system.errors import one_line
from unicron_detector.processes.job_output import standard_error
from unicron_detector.processes.log_format import log_line

COMPLAINTS = 5  # lines about bad messages from one side: a broken peer must not fill the job's log


class JobLog:
    """Lines on the agent's standard error, which Slurm writes into the job's. None of its methods waits for the log."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._complaints: Counter[str] = Counter()
        self._once: set[str] = set()

    def inform(self, text: str) -> None:
        """Write news."""
        self._write("info", text)

    def warn(self, text: str) -> None:
        """Write that something is not as it should be."""
        self._write("warning", text)

    def warn_once(self, text: str) -> None:
        """Write it, unless that very line has been written before."""
        if text not in self._once:
            self._once.add(text)
            self.warn(text)

    def drop(self, peer: str, why: str) -> None:
        """A bad message was dropped: the first ones of a peer get a line each."""
        self._complaints[peer] += 1
        if self._complaints[peer] <= COMPLAINTS:
            self.warn(f"dropped a bad message of {peer}: {why[:300]}")

    def _write(self, level: str, text: str) -> None:
        line = log_line(level, "unicron", one_line(text), job=self._place.label, node=self._place.node)
        standard_error.write(f"{line}\n".encode())
