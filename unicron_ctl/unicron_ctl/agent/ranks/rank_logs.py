"""The files with the output of each rank, and the ranks that the job's own log shows."""

from __future__ import annotations

from collections.abc import Mapping

from unicron_ctl.agent.connections.job_environment import log_folder
from unicron_ctl.shared.system.errors import WRONG_USE, UserError
from unicron_detector.processes.rank_output import LogFile, RankOutput

CONSOLE = "UNICRON_CONSOLE_RANKS"


def shown_ranks(environment: Mapping[str, str]) -> frozenset[int] | None:
    """Return the local ranks whose output the job's log shows; None for all. Raises UserError."""
    text = environment.get(CONSOLE, "")
    if not text:
        return None
    try:
        return frozenset(int(number) for number in text.split(",")) if text != "none" else frozenset()
    except ValueError:
        raise UserError(f"{CONSOLE}={text!r}: write local ranks, as in 0,1, or none", WRONG_USE) from None


class RankLogs:
    """The files of this node's ranks. Raises UserError for a wrong variable."""

    def __init__(self, environment: Mapping[str, str], job: str) -> None:
        self._folder, self._shown = log_folder(environment, job), shown_ranks(environment)
        self._files: dict[int, LogFile] = {}

    def output(self, local: int, environment: Mapping[str, str]) -> RankOutput:
        """Return the output of this local rank's process, which has this environment."""
        shown = self._shown is None or local in self._shown
        if self._folder is None:
            return RankOutput(shown=shown)
        number = int(environment.get("UNICRON_SLOT") or environment.get("RANK") or local)
        file = self._files.setdefault(number, LogFile(self._folder / f"rank-{number}.log"))
        return RankOutput(file, shown)

    def close(self, seconds: float) -> None:
        """Close the files; text that waits to be written gets `seconds`."""
        for file in self._files.values():
            file.close(seconds)
        self._files.clear()
