"""Users who speak to the controller, as far as their identity is proven (docs/design/trust.md)."""

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
    """The user who asks, orders or registers."""

    uid: int | None = None
    """The user of a munge credential that is bound to the connection; None without one."""
    user: str = ""
    """The uid's name, empty if the name service does not know it; for people, and not compared if there is a uid."""
    admin: bool = False
    """root, the controller's own user, or one of `[controller] admins`."""
    reader: bool = False
    """One of `[controller] readers`."""

    def owns(self, job: JobState) -> bool:
        return is_owner(self.uid, self.user, job.uid, job.settings.user)

    @property
    def reads_all(self) -> bool:
        """Whether this user may see everything of every job and node."""
        return self.admin or self.reader

    def may_read(self, job: JobState) -> bool:
        """Whether this user may see everything of the job: its owner, admins and readers may."""
        return self.reads_all or self.owns(job)

    def may_order(self, job: JobState) -> bool:
        """Whether this user may give orders about the job: its owner and admins may."""
        return self.admin or self.owns(job)

    def __str__(self) -> str:
        if self.uid is None:
            return self.user or "nobody that munge knows"
        return self.user or f"uid {self.uid}"


NOBODY = Asker()
EVERYBODY = Asker(admin=True)  # with auth = "none" all who reach the loopback address are the controller's user
