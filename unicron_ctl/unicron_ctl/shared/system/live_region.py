"""A part of the terminal that changes in place: for `unicronctl top`, the demo and the torture."""

from __future__ import annotations

from typing import Any, Self

from rich.console import Console, RenderableType
from rich.live import Live


class LiveRegion:
    """A context manager for a part of the terminal that changes in place; it shows nothing on a pipe."""

    def __init__(self, console: Console, **settings: Any):
        self._console = console
        self._live = Live(console=console, **settings) if console.is_terminal else None

    def __enter__(self) -> Self:
        if self._live:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live:
            self._live.stop()

    def show_now(self, shown: RenderableType) -> None:
        """Show this in place of what was there."""
        if self._live:
            self._live.update(shown, refresh=True)
