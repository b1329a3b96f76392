"""The processes of an agent's ranks: they are started, listened to, and collected when they have ended."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from detector.supervise import Child
from unicron_ctl.agent.polling import Polling
from unicron_ctl.agent.ranks import Rank
from unicron_ctl.agent.sockets import RankLine


class Processes:
    """hear(): takes in what the ranks have said. ended(rank): its process has, and its status says so. tell(): the
    controller, of all ranks. say: one line into the job's log."""

    def __init__(
        self,
        polling: Polling,
        line: RankLine,
        hear: Callable[[], None],
        ended: Callable[[Rank], None],
        tell: Callable[[], None],
        say: Callable[[str], None],
    ) -> None:
        self._polling, self._line = polling, line
        self._hear, self._ended, self._tell, self._say = hear, ended, tell, say

    def start(self, rank: Rank, incarnation: int) -> None:
        """The rank's next process."""
        if self._line.bind_again():
            folder = self._line.folder
            self._say(f"{folder} is gone, and is made again: a cleaner of old files must leave it alone")
        rank.start(incarnation)
        self.attend(rank)

    def attend(self, rank: Rank) -> None:
        """Listen to its new process, and tell the controller of it."""
        if rank.child is not None:
            self._polling.watch(rank.child.pidfd, partial(self._collect, rank))
            self._polling.watch(rank.child.stderr, partial(self._pass_stderr, rank.child))
        elif rank.status.exit is not None:
            self._say(rank.status.exit.last_line)
        self._tell()

    def _pass_stderr(self, child: Child) -> None:
        if not child.pass_stderr():
            self._polling.unwatch(child.stderr)

    def _collect(self, rank: Rank) -> None:
        child = rank.child
        if child is None:
            return
        self._polling.unwatch(child.pidfd)
        self._polling.unwatch(child.stderr)
        self._hear()  # what it said last, its exception above all, comes before its end
        rank.collect()
        self._ended(rank)
        self._tell()
