"""Stack traces of ranks that the controller wants to see: asked for, and answered when they are made."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from unicron_ctl.agent.ranks.ranks import Rank, stacks_file
from unicron_ctl.shared.protocol import wire
from unicron_detector.processes.stacks import Dump

DUMP_SECONDS = 0.02  # between two looks at traces in the making


class Dumps:
    """Makes stack traces of ranks and sends them.

    endpoint: of the ranks' socket, beside which their processes write. send: to the controller.
    """

    def __init__(
        self, job: str, ranks: Mapping[int, Rank], endpoint: str, send: Callable[[wire.Message], None]
    ) -> None:
        self._job, self._ranks, self._endpoint, self._send = job, ranks, endpoint, send
        self._making: dict[int, tuple[int, Dump]] = {}  # slot -> (incarnation, its traces)

    @property
    def timeout(self) -> float:
        """Seconds until :meth:`send_finished` is to be called whatever happens; infinity while nothing is made."""
        return DUMP_SECONDS if self._making else float("inf")

    def start_dump(self, order: wire.Stacks) -> None:
        """Has them made, if the process is still there."""
        rank = self._ranks.get(order.slot)
        if rank is None or rank.child is None or rank.status.incarnation != order.incarnation:
            return
        if order.slot in self._making:
            return
        self._making[order.slot] = order.incarnation, Dump(rank.trainer, stacks_file(self._endpoint, order.slot))

    def send_finished(self) -> None:
        """Sends those that are made."""
        for slot, (incarnation, dump) in list(self._making.items()):
            if dump.done():
                del self._making[slot]
                self._send(
                    wire.StackTrace(
                        job=self._job,
                        slot=slot,
                        incarnation=incarnation,
                        how=dump.how,
                        state=dump.state,
                        text=dump.text,
                    )
                )
