"""The live view: jobs and nodes at present, and the last lines of the story. On a pipe it prints the story's lines
only."""

from __future__ import annotations

import time
from collections import deque

from rich.console import Console, Group
from rich.text import Text

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
        """Adds a line to the story, with the seconds since the start."""
        line = f"{time.time() - self._began:6.1f} s  {text}"
        self._lines.append(line)
        if not self._live:
            self._console.print(Text(line), soft_wrap=True)

    def show(self, status: Status) -> None:
        """Shows the controller's status."""
        last = max(status.failures, key=lambda failure: failure.id, default=None)
        if last and last.reason != self._last_event:
            self._last_event = last.reason
            self.add_line(f"    unicron: SEV{last.severity} {last.cause}: {last.reason}")
        jobs = _jobs(status).styled_lines(self._console.width)
        self.show_now(Group(*jobs, _nodes(status), Text("\n".join(self._lines))))


def _jobs(status: Status) -> Listing:
    table = Listing(
        "job",
        "state",
        "generation",
        "nodes",
        "iteration",
        "s/iteration",
        "loss",
        "weight",
        "WAF (GFLOP/s)",
        cut=["job"],
    )
    for job in status.jobs:
        seconds = job.iteration_seconds
        table.add_row(
            job.name,
            job.state,
            str(job.generation),
            f"{job.nodes} of {job.max_nodes}",
            f"{job.iteration} of {job.train_iterations}",
            f"{seconds:.2f}" if seconds else "-",
            f"{job.loss:.4f}" if job.loss is not None else "-",
            f"{job.weight:g}",
            f"{job.waf / 1e9:.1f}",
        )
    return table


def _nodes(status: Status) -> Text:
    names = {job.job: job.name for job in status.jobs}
    words = Text("nodes  ")
    for node in status.nodes:
        users = " ".join(
            f"{names.get(user.rpartition('_')[0], '')}[{user.rpartition('_')[2]}]" for user in node.used_by
        )
        words.append(f"{node.node} ", style="bold")
        words.append(
            f"{users or ('idle' if node.healthy else '+'.join(node.states).lower())}   ",
            style="green" if node.healthy else "red",
        )
    return words
