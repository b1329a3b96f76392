"""Users who speak to the controller, as far as it is proven (docs/design/trust.md)."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import NamedTuple

from unicron_ctl.controller.model.job_state import JobState
from unicron_ctl.shared.protocol.audience import is_owner


class Roles(NamedTuple):
    """Users whom the configuration names: `[controller] admins` and `readers`."""

    admins: Collection[str] = ()
    readers: Collection[str] = ()


@dataclass(frozen=True)
class Asker:
    """Whoever asks, orders or registers.

    uid: of a munge credential that is bound to the connection, None without one. user: its name, empty when the name
    service does not know it, so it is for people and never compared where there is a uid. admin: root, the
    controller's own user, or one of `[controller] admins`. reader: one of `[controller] readers`.
    """

    uid: int | None = None
    user: str = ""
    admin: bool = False
    reader: bool = False

    def owns(self, job: JobState) -> bool:
        """The job is this user's."""
        return is_owner(self.uid, self.user, job.uid, job.settings.user)

    @property
    def reads_all(self) -> bool:
        """Whether this user is told all of every job and node: admins and readers are."""
        return self.admin or self.reader

    def may_read(self, job: JobState) -> bool:
        """The job's owner, admins and readers are told all of it."""
        return self.reads_all or self.owns(job)

    def may_order(self, job: JobState) -> bool:
        """The job's owner and admins give orders about it."""
        return self.admin or self.owns(job)

    def __str__(self) -> str:
        if self.uid is None:
            return self.user or "nobody that munge knows"
        return self.user or f"uid {self.uid}"


NOBODY = Asker()
EVERYBODY = Asker(admin=True)  # with auth = "none" all who reach the loopback address are the controller's user
