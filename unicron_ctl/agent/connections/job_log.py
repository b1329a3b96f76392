"""What an agent says in the job's log."""

from __future__ import annotations

from collections import Counter

from unicron.ctl.agent.connections.identity import Place
from unicron.ctl.system.errors import one_line
from unicron.detector.processes.job_output import standard_error

COMPLAINTS = 5  # lines about bad messages from one side: a broken peer must not fill the job's log


class JobLog:
    """Lines on the agent's standard error, which Slurm writes into the job's."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._complaints: Counter[str] = Counter()

    def say(self, text: str) -> None:
        """One line. Does not wait for the log."""
        standard_error.write(f"unicron: {self._place.label} on {self._place.node}: {one_line(text)}\n".encode())

    def drop(self, peer: str, why: str) -> None:
        """A bad message: the first ones of a peer get a line each."""
        self._complaints[peer] += 1
        if self._complaints[peer] <= COMPLAINTS:
            self.say(f"dropped a bad message of {peer}: {why[:300]}")
