"""What is happening: a progress bar with a line below it in a terminal, plain lines elsewhere."""

from __future__ import annotations

import time

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.text import Text

PIPE_COLUMNS = 170


class Show:
    """A context manager. `tell` adds a line, `now` changes the one that lives, `advance` the bar."""

    def __init__(self, total: int, done: int = 0, what: str = "failures"):
        self._console = Console()
        if not self._console.is_terminal:
            self._console = Console(width=PIPE_COLUMNS)
        columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()
        self._bar = Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=self._console)
        self._task = self._bar.add_task(what, total=total, completed=done)
        self._live = Live(console=self._console, refresh_per_second=4) if self._console.is_terminal else None
        self._began = time.monotonic()
        self._line = ""

    def __enter__(self) -> Show:
        if self._live:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live:
            self._live.stop()

    def tell(self, text: str) -> None:
        """One line that stays, with the seconds since the start."""
        line = Text(f"{time.monotonic() - self._began:7.1f} s  {text}")
        self._console.print(line, soft_wrap=True)

    def now(self, text: str) -> None:
        """What is happening at this moment."""
        if self._live and text != self._line:
            self._line = text
            self._live.update(Group(self._bar, Text(text)))

    def advance(self, done: int) -> None:
        """So many are behind us."""
        self._bar.update(self._task, completed=done)
