"""The live view: jobs and nodes, and the last lines of the story. On a pipe it prints only the story's lines."""

from __future__ import annotations

import time
from collections import deque

from rich.console import Console, Group
from rich.text import Text

from unicron_ctl.shared.commands.status_tables import Column, listing, number
from unicron_ctl.shared.protocol.answer_schema import Status
from unicron_ctl.shared.system.columns import Listing
from unicron_ctl.shared.system.live_region import LiveRegion

LINES = 14


class View(LiveRegion):
    """`add_line` adds a line to the story, `show` redraws the tables."""

    def __init__(self, console: Console):
        super().__init__(console, refresh_per_second=8, transient=True)
        self._began = time.time()
        self._lines: deque[str] = deque(maxlen=LINES)
        self._last_event = ""

    def __exit__(self, *_: object) -> None:
        super().__exit__()
        if self._live:
            for line in self._lines:
                self._console.print(Text(line))

    def add_line(self, text: str) -> None:
        """Add a line to the story, with the seconds since the start."""
        line = f"{time.time() - self._began:6.1f} s  {text}"
        self._lines.append(line)
        if not self._live:
            self._console.print(Text(line), soft_wrap=True)

    def show(self, status: Status) -> None:
        """Show the controller's status."""
        last = max(status.failures, key=lambda failure: failure.id, default=None)
        if last and last.reason != self._last_event:
            self._last_event = last.reason
            self.add_line(f"    unicron: SEV{last.severity} {last.cause}: {last.reason}")
        jobs = _jobs(status).styled_lines(self._console.width)
        self.show_now(Group(*jobs, _nodes(status), Text("\n".join(self._lines))))


def _jobs(status: Status) -> Listing:
    return listing(
        (
            Column("job", lambda job: job.name, cut=True),
            Column("state", lambda job: job.state),
            Column("generation", lambda job: str(job.generation)),
            Column("nodes", lambda job: f"{job.nodes} of {job.max_nodes}"),
            Column("iteration", lambda job: f"{job.iteration} of {job.train_iterations}"),
            Column("s/iteration", lambda job: number(job.iteration_seconds or None, 2)),
            Column("loss", lambda job: number(job.loss, 4)),
            Column("weight", lambda job: f"{job.weight:g}"),
            Column("WAF (GFLOP/s)", lambda job: f"{job.waf / 1e9:.1f}"),
        ),
        status.jobs,
    )


def _nodes(status: Status) -> Text:
    names = {job.job: job.name for job in status.jobs}
    line = Text("nodes  ")
    for node in status.nodes:
        elements = [user.rpartition("_") for user in node.used_by]
        state = "idle" if node.healthy else "+".join(node.states).lower()
        users = " ".join(f"{names.get(job, '')}[{number}]" for job, _, number in elements)
        line.append(f"{node.node} ", style="bold")
        line.append(f"{users or state}   ", style="green" if node.healthy else "red")
    return line
