"""Starts the zygote, and supervises its forks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from unicron_ctl.agent.connections.connections import Connections
from unicron_ctl.agent.ranks import warm_commands
from unicron_ctl.agent.ranks.ranks import Rank
from unicron_ctl.agent.ranks.zygote_client import AlwaysCold, Coming, Starter, ZygoteClient
from unicron_ctl.shared.system.errors import UserError
from unicron_detector.processes.supervise import Surroundings, reap_orphans

ORPHANS_SECONDS = 1.0  # between two looks for adopted processes that have ended
SESSION_NEEDS = "unicron_transition.session.session"  # every rank of session mode imports it


class WarmStart:
    """Starts this agent's ranks as forks of a preloaded process if it can."""

    def __init__(
        self,
        ranks: Mapping[int, Rank],
        command: Sequence[str],
        net: Connections,
        attend: Callable[[Rank], None],  # called for a rank that has its process
    ):
        self._ranks, self._command, self._attend = ranks, command, attend
        self._watch, self._unwatch, self._log = net.polling.watch, net.polling.unwatch, net.log
        self._zygote: ZygoteClient | None = None
        self._looked = 0.0

    def start_zygote(self, ranks: Sequence[Mapping[str, str]], environment: Mapping[str, str]) -> None:
        """Start the zygote. ranks: environments that differ where ranks may differ; environment: the agent's."""
        starter = self._starter(warm_commands.common(ranks), environment)
        for rank in self._ranks.values():
            rank.starter = starter

    def _starter(self, zygote: dict[str, str], environment: Mapping[str, str]) -> Starter:
        if not warm_commands.wanted(environment):
            return AlwaysCold(f"{warm_commands.WARM}=0")
        split = warm_commands.python_command(self._command)
        if split is None:
            return AlwaysCold("the command is neither `python SCRIPT.py` nor `python -m MODULE`")
        try:
            named = warm_commands.named_modules(environment)
        except UserError as error:
            self._log.warn_once(str(error))
            return AlwaysCold(str(error))
        more = [SESSION_NEEDS] if "UNICRON_AGENT" in zygote else []
        self._zygote = ZygoteClient(*split, zygote, named, more, self._watch, self._unwatch)
        self._zygote.start_process()
        return self._zygote

    def fork(self, words: list[str], stdout: int) -> Coming | None:
        """Return a warm process with the variables that all ranks have in common; None without a zygote."""
        if self._zygote is None:
            return None
        return self._zygote.request_fork(self._zygote.environment, words, Surroundings(stdout=stdout))

    def start_forked_ranks(self) -> None:
        """Begin processes that were forked, and start cold those that were not."""
        for rank in self._ranks.values():
            if rank.coming is not None and rank.coming.settled:
                rank.arrive()
                self._attend(rank)
            if self._zygote is not None and rank.cold:
                self._log.warn_once(f"its ranks start cold: {rank.cold}")

    def on_timer(self, now: float, other: int | None) -> None:
        """Look after the zygote and after adopted processes. now: monotonic. other: a further child that is waited
        for."""
        if self._zygote is not None:
            self._zygote.on_timer(now)
        coming = any(rank.coming is not None for rank in self._ranks.values())  # its process is not known yet
        if now - self._looked >= ORPHANS_SECONDS and not coming:
            self._looked = now
            ours = [rank.child.pid for rank in self._ranks.values() if rank.child is not None]
            reap_orphans([*ours, *(pid for pid in (self.pid, other) if pid is not None)])

    def timeout(self, now: float) -> float:
        """Return the seconds until :meth:`on_timer` must be called."""
        return self._zygote.timeout(now) if self._zygote is not None else float("inf")

    @property
    def pid(self) -> int | None:
        """The zygote's process."""
        return self._zygote.pid if self._zygote is not None else None

    def close(self) -> None:
        """End the zygote."""
        if self._zygote is not None:
            self._zygote.close()
        reap_orphans([])
