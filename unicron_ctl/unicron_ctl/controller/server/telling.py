"""Sends the notices of `shared.notices` to the targets of [notify]. No decision depends on it.

The state keeps a cursor for each target: the last event that it has heard of. So a restart neither repeats nor loses a
notice; only if the controller dies while it sends, the same message may come again, with the same ids. A target that
hangs blocks only a thread of its own.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from unicron_ctl.shared.log import records
from unicron_ctl.shared.log.records import Event, Record
from unicron_ctl.shared.notices.notices import ADMIN, Message, Notice, Notices, compose
from unicron_ctl.shared.notices.notify_targets import Deliver, Hooks, NotTold, targets
from unicron_ctl.shared.settings.notify import NotifyConfig, usable
from unicron_ctl.shared.system.mailbox import Mailbox

log = logging.getLogger("unicron.controller.telling")
HOUR, DAY = 3600.0, 86400.0
FIRST_RETRY, LONGEST_RETRY = 30.0, 3600.0  # seconds; twice as long each time
GIVE_UP = 6.0  # times the section's time limit: a message that takes longer is sent again
MOST_LOST = 8  # messages to one target that were given up and whose threads still hang
MOST_WAITING = 1000  # notices for one target; of more, the oldest are dropped and counted


class Sending(NamedTuple):
    """A message on its way."""

    message: Message
    upto: int  # the id of its last notice
    notices: int  # in it
    left_out: int  # notices that it counts as missing
    began: float
    urgent: bool


@dataclass
class Target:
    """One target."""

    name: str
    deliver: Deliver
    upto: int  # the last event that it has heard of
    waiting: deque[Notice] = field(default_factory=deque)
    left_out: int = 0  # notices that it will not get
    sending: Sending | None = None
    tries: int = 0
    retry_from: float = 0.0
    retry_after: float = 0.0
    lost: int = 0  # messages that were given up and whose threads still hang
    sent: list[tuple[float, bool]] = field(default_factory=list)
    """The messages of the last hour: the time, and whether a notice in it needs an admin."""

    def add(self, notice: Notice) -> None:
        """Queues a notice. Of too many, the oldest that needs no admin is dropped, or else the oldest."""
        self.waiting.append(notice)
        while len(self.waiting) > MOST_WAITING:
            del self.waiting[next((i for i, one in enumerate(self.waiting) if one.kind != ADMIN), 0)]
            self.left_out += 1

    def is_due(self, now: float, config: NotifyConfig) -> bool:
        """Whether a message should go out now. Messages with something for an admin have a limit of their own, so that
        they wait behind no others. A time in the future shows a clock that was set back, and counts as over."""
        self.sent = [(at, urgent) for at, urgent in self.sent if 0 <= now - at < HOUR]
        if self.sending or not self.waiting or 0 <= now - self.retry_from < self.retry_after:
            return False
        urgent = self.has_urgent()
        if sum(one == urgent for _, one in self.sent) >= config.most_per_hour:
            return False
        first = next(notice for notice in self.waiting if notice.kind == ADMIN or not urgent)
        return not 0 <= now - first.time < config.digest_seconds

    def has_urgent(self) -> bool:
        """Whether something that needs an admin waits."""
        return any(notice.kind == ADMIN for notice in self.waiting)

    def forget_old(self, now: float) -> None:
        """Drops notices that are too old to be of use."""
        while self.waiting and now - self.waiting[0].time >= DAY:
            self.waiting.popleft()
            self.left_out += 1


class Telling:
    """Tells all targets."""

    def __init__(
        self, results: Mailbox[Callable[[], None]], record: Callable[[Record], object], where: str = ""
    ) -> None:
        self._results = results  # calls from threads to the loop
        self._record = record  # appends to the log
        self.where = where  # the controller's address, for people who have several
        self._hooks = Hooks()
        self._notices = Notices()
        self._config = NotifyConfig()
        self._unread: Callable[[], None] | None = None  # tries in a thread to read the secrets
        self._look_at, self._looking = 0.0, threading.Thread()
        self._past: deque[Notice] = deque(maxlen=MOST_WAITING)
        self.targets: dict[str, Target] = {}

    def configure(self, config: NotifyConfig, cursors: dict[str, int], last: int) -> None:
        """Takes the section. cursors: by target, the last event that it has heard of. last: the newest event, after
        which a new target begins."""
        given, (config, secrets, read) = config, usable(config)
        if self._unread is not None and read:
            log.info("[notify] %s can be read now", config.secrets)
        # Their file system may not be mounted yet. The check of the section has already reported what is wrong.
        self._unread = None if read else partial(self._read_secrets, given, cursors, last)
        self._config, before = config, self.targets
        self.targets = {}
        for name, deliver in targets(config, secrets, self._hooks).items():
            if name in before:
                before[name].deliver = deliver
                self.targets[name] = before[name]
                continue
            if name not in cursors:
                self._record(records.NoticesSent(target=name, upto=last, reason=f"{name} is told from now on"))
            target = self.targets[name] = Target(name, deliver, cursors.get(name, last))
            for notice in self._past:
                self._add(target, notice)

    def _read_secrets(self, config: NotifyConfig, cursors: dict[str, int], last: int) -> None:
        """Takes the section again once its secrets can be read. It runs in a thread, because reading may hang."""
        attempt = self._unread
        if usable(config)[2]:
            self._results.put(lambda: self.configure(config, cursors, last) if self._unread is attempt else None)

    def note(self, event: Event) -> None:
        """Takes in one record."""
        notice = self._notices.of(event)
        if notice is not None:
            self._past.append(notice)
            for target in self.targets.values():
                self._add(target, notice)

    def close(self) -> None:
        """Ends the hooks that run. Their targets are told after the next start."""
        self._hooks.close()

    def _add(self, target: Target, notice: Notice) -> None:
        if notice.id > target.upto and notice.kind in self._config.kinds:
            target.add(notice)

    def work(self, now: float) -> None:
        """Starts the messages that are due; returns at once."""
        if self._unread is not None and now >= self._look_at and not self._looking.is_alive():
            self._look_at = now + FIRST_RETRY
            self._looking = threading.Thread(target=self._unread, name="unicron-secrets", daemon=True)
            self._looking.start()
        for target in self.targets.values():
            if target.waiting and not target.sending:
                target.forget_old(now)
            self._give_up(target, now)
            if target.is_due(now, self._config):
                self._start(target, now)

    def _start(self, target: Target, now: float) -> None:
        notices = list(target.waiting)
        message = compose(notices, target.left_out, self.where)
        sending = Sending(message, notices[-1].id, len(notices), target.left_out, now, target.has_urgent())
        target.sending = sending
        threading.Thread(
            target=self._deliver, args=(target, sending), name=f"unicron-{target.name}", daemon=True
        ).start()

    def _deliver(self, target: Target, sending: Sending) -> None:
        error = ""
        try:
            target.deliver(sending.message)
        except NotTold as reason:
            error = str(reason)
        self._results.put(lambda: self._on_delivery(target, sending, error))

    def _give_up(self, target: Target, now: float) -> None:
        """Stops waiting for a message that no time limit ends, because a name or file system does not answer. Its
        thread hangs on, so only a few may."""
        sending, limit = target.sending, GIVE_UP * self._config.timeout
        if sending is not None and not 0 <= now - sending.began < limit and target.lost < MOST_LOST:
            self._on_delivery(target, sending, f"it did not end within {limit:g} s")
            target.lost += 1

    def _on_delivery(self, target: Target, sending: Sending, error: str) -> None:
        if target.sending is not sending:  # given up before
            target.lost -= 1
            return
        target.sending = None
        target.sent.append((sending.began, sending.urgent))
        if error:
            wait = min(LONGEST_RETRY, FIRST_RETRY * 2.0 ** min(20, target.tries))
            target.tries, target.retry_from, target.retry_after = target.tries + 1, sending.began, wait
            text = "%s was not told of %d notices, and is again in %.0f s: %s"
            log.warning(text, target.name, sending.notices, wait, error)
            return
        target.tries, target.upto = 0, sending.upto
        target.left_out -= sending.left_out  # more may have been left out meanwhile
        while target.waiting and target.waiting[0].id <= sending.upto:
            target.waiting.popleft()
        if self.targets.get(target.name) is target:
            self._record(records.NoticesSent(target=target.name, upto=sending.upto, notices=sending.notices))
