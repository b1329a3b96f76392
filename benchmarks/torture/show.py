"""The progress for people: a bar with a line below it in a terminal, plain lines elsewhere."""

from __future__ import annotations

import time

from rich.console import Group
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.text import Text

from unicron_ctl.lab.commands.demo import console
from unicron_ctl.shared.system.live_region import LiveRegion


class Show(LiveRegion):
    """A context manager. `tell` adds a line, `now` changes the one that lives, `advance` the bar."""

    def __init__(self, total: int, done: int = 0, what: str = "failures"):
        super().__init__(console(), refresh_per_second=4)
        columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()
        self._bar = Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=self._console)
        self._task = self._bar.add_task(what, total=total, completed=done)
        self._began = time.monotonic()
        self._line = ""

    def tell(self, text: str) -> None:
        """One line that stays, with the seconds since the start."""
        line = Text(f"{time.monotonic() - self._began:7.1f} s  {text}")
        self._console.print(line, soft_wrap=True)

    def now(self, text: str) -> None:
        """Show what is happening at this moment."""
        if self._live and text != self._line:
            self._line = text
            self._live.update(Group(self._bar, Text(text)))

    def advance(self, done: int) -> None:
        """So many are behind us."""
        self._bar.update(self._task, completed=done)
