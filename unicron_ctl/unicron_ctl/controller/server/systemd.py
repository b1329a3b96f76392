"""Notifies systemd: ready, reloading, stopping, and the watchdog (sd_notify(3), Type=notify). Nothing here raises or
waits, because a service manager that does not listen must not stop the controller."""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Mapping

log = logging.getLogger("unicron.systemd")
STARTING_SECONDS = 1.0  # between two messages during the start
EXTENDED_SECONDS = 30  # by which each of them extends systemd's time-out


class SystemdNotifier:
    """Sends messages to systemd, if there is one."""

    def __init__(self, environment: Mapping[str, str] = os.environ) -> None:
        address = environment.get("NOTIFY_SOCKET", "")
        # A leading @ stands for the zero byte of an abstract address (unix(7)).
        self._address = "\0" + address[1:] if address.startswith("@") else address
        self.watchdog_seconds = _watchdog_seconds(environment) if address else 0.0  # 0 without one for this process
        self._last: float | None = None
        self._started: float | None = None
        self._failed = False
        self._waits = ""

    def ready(self) -> None:
        """Tells systemd that the start, or a reload, is over."""
        self._notify("READY=1\nSTATUS=" if self._waits else "READY=1")

    def starting(self, now: float) -> None:
        """Extends the time for the start; called now and then until `ready`. now: as for `watchdog`."""
        if self._started is None or now - self._started >= STARTING_SECONDS:
            self._started = now
            self._notify(f"EXTEND_TIMEOUT_USEC={EXTENDED_SECONDS * 1_000_000}\nWATCHDOG=1")

    def waiting(self, what: str) -> None:
        """Tells systemd that a standby is up, and what it waits for. `ready` follows when it takes over."""
        now = time.monotonic()
        if what != self._waits:
            self._waits = what
            self._notify(f"READY=1\nSTATUS={what}")
        self.watchdog(now)

    def reloading(self) -> None:
        """Tells systemd that the configuration is being read again; `ready` follows."""
        self._notify(f"RELOADING=1\nMONOTONIC_USEC={time.monotonic_ns() // 1000}")

    def stopping(self) -> None:
        self._notify("STOPPING=1")

    def watchdog(self, now: float) -> None:
        """Feeds the watchdog twice per period; called at each turn of the loop. now: seconds of any clock that never
        goes backwards."""
        if not self.watchdog_seconds:
            return
        if (self._last is None or now - self._last >= self.watchdog_seconds / 2) and self._notify("WATCHDOG=1"):
            self._last = now

    def _notify(self, state: str) -> bool:
        if not self._address:
            return False
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as channel:
                channel.sendto(state.encode(), self._address)
        except OSError as error:
            if not self._failed:  # once: a watchdog would repeat it at each turn
                log.warning("cannot notify systemd (%s): %s", state.partition("\n")[0], error.strerror or error)
            self._failed = True
            return False
        self._failed = False
        return True


def _watchdog_seconds(environment: Mapping[str, str]) -> float:
    """Return the silence after which systemd ends this process (sd_watchdog_enabled(3))."""
    microseconds, process = environment.get("WATCHDOG_USEC", ""), environment.get("WATCHDOG_PID", "")
    if not microseconds.isdecimal() or (process and process != str(os.getpid())):
        return 0.0
    return int(microseconds) / 1e6
