"""Watches the node itself: its kernel log, the out-of-memory kills of the ranks' cgroup, its links.

It has a thread of its own, because sysfs of a sick adapter may block for a minute; a descriptor tells the agent's loop
of news. What cannot be read is logged once and left out: the training does not depend on it.
"""

from __future__ import annotations

import contextlib
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path

from unicron_ctl.shared.protocol import structs, wire
from unicron_ctl.shared.settings.config import AgentConfig, Config
from unicron_ctl.shared.settings.config_file import load
from unicron_ctl.shared.system.errors import UserError
from unicron_detector.failures.classify import Classifier
from unicron_detector.health.kernel_log import KMSG, KernelFaults, KernelLog, why_not
from unicron_detector.health.links import LinkWatch, describe
from unicron_detector.health.oom_kills import KILL_CODES, OomKills, counter_file

TICK_SECONDS = 1.0  # between two looks at the memory cgroup, and at files that cannot be polled
KEPT, KEPT_SECONDS = 100, 300.0  # events that a restarted controller gets once more
LINES_PER_SECOND = 500  # with more, the kernel log is read only once a second

Warn = Callable[[str], None]


class NodeWatch:
    """Watches the node. Its descriptor becomes readable when `new_events` has new ones."""

    def __init__(self, warn: Warn, options: AgentConfig, classifier: Classifier, links: Path | None = None):
        self._warn, self._seconds = warn, options.link_seconds
        self._new: deque[wire.NodeEvent] = deque(maxlen=KEPT)
        self._kept: deque[wire.NodeEvent] = deque(maxlen=KEPT)
        self._number = 0
        self._lock = threading.Lock()
        self._ready, self._wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._stop_read, self._stop = os.pipe2(os.O_CLOEXEC)
        self._faults = KernelFaults(classifier)
        self._log: KernelLog | None = None
        self._lines = 0  # of the kernel log, since the last tick
        self._oom = OomKills(counter_file() if options.node_events else None)
        self._thread: threading.Thread | None = None
        if options.node_events:
            self._open(options.kmsg)
            self._thread = threading.Thread(target=self._run, args=(links,), name="unicron-node", daemon=True)
            self._thread.start()

    def fileno(self) -> int:
        return self._ready

    def new_events(self, job: str, element: int, agent: str, again: bool = False) -> list[wire.NodeEvent]:
        """Return new events as messages of that agent; again: all that are kept, for a restarted controller."""
        with contextlib.suppress(BlockingIOError):
            os.read(self._ready, 4096)
        with self._lock:
            fresh = list(self._new)
            self._new.clear()
            self._kept += fresh
            recent = [event for event in self._kept if time.time() - event.at < KEPT_SECONDS]
            found = recent if again else fresh
        for event in found:
            event.job, event.element, event.agent = job, element, agent
        return found

    def explain(self, end: structs.Exit) -> None:
        """Mark the end of a rank that was killed because memory ran out."""
        if end.code in KILL_CODES:
            end.oom = end.oom or self._oom.claim()

    def close(self) -> None:
        """End the thread; one that is blocked is left behind, as a daemon."""
        os.write(self._stop, b".")
        if self._thread is not None:
            self._thread.join(0.5)
        if self._thread is None or not self._thread.is_alive():
            for descriptor in (self._ready, self._wake, self._stop_read, self._stop):
                os.close(descriptor)
            if self._log is not None:
                self._log.close()

    def _open(self, path: str) -> None:
        try:
            self._log = KernelLog(path)
        except OSError as error:
            self._warn(why_not(error, path))

    def _run(self, links: Path | None) -> None:
        poll = select.poll()
        poll.register(self._stop_read, select.POLLIN)
        try:
            watched = LinkWatch(links)
            next_links, next_tick = time.monotonic() + self._seconds, 0.0
            while True:
                if self._log is not None and self._log.pollable and self._lines < LINES_PER_SECOND:
                    poll.register(self._log.fileno(), select.POLLIN)
                found = [descriptor for descriptor, _ in poll.poll(int(min(TICK_SECONDS, self._seconds) * 1000))]
                if self._stop_read in found:
                    return
                self._read_log(poll)
                now = time.monotonic()
                if now >= next_tick:
                    next_tick, self._lines = now + TICK_SECONDS, 0
                    self._memory()
                if now >= next_links:
                    next_links = now + self._seconds
                    for name, rises in watched.new_flaps().items():
                        self._add_event("link", describe(name, rises, self._seconds), name, rises)
        except Exception as error:  # without the watch the agent goes on
            self._warn(f"the node is no longer watched: {type(error).__name__}: {error}")

    def _read_log(self, poll: select.poll) -> None:
        if self._log is None or self._lines >= LINES_PER_SECOND:
            return
        try:
            lines = self._log.read()
        except OSError as error:
            self._unpoll(poll, self._log)
            self._log.close()
            self._warn(why_not(error, self._log.path))
            self._log = None
            return
        self._lines += len(lines)
        if self._lines >= LINES_PER_SECOND or not self._log.pollable:
            self._unpoll(poll, self._log)
        for line in lines:
            fault = self._faults.read_line(line, time.monotonic())
            if fault is not None:
                self._add_event("kernel", fault.text, fault.code, fault.count)

    @staticmethod
    def _unpoll(poll: select.poll, log: KernelLog) -> None:
        with contextlib.suppress(KeyError):
            poll.unregister(log.fileno())

    def _memory(self) -> None:
        killed = self._oom.unclaimed_kills()
        if killed:
            text = f"out of memory: {killed} processes of the job's cgroup were killed, none of them a rank"
            self._add_event("memory", text, "oom_kill", killed)

    def _add_event(self, source: str, text: str, code: str, count: int) -> None:
        sender = "", 0, ""  # new_events fills it in
        with self._lock:
            self._number += 1
            self._new.append(wire.NodeEvent(*sender, self._number, source, text, time.time(), code, count))
        with contextlib.suppress(BlockingIOError):
            os.write(self._wake, b".")


def configuration(warn: Warn, environment: Mapping[str, str]) -> Config:
    """Return the node's unicron.toml, or the defaults if it cannot be used. Never raises."""
    try:
        return load(environment=environment)
    except UserError as error:
        warn(f"the node is watched with the defaults: {error}")
        return Config()


def start(warn: Warn, environment: Mapping[str, str], loaded: Config) -> NodeWatch:
    """Start the watch by the node's unicron.toml and the environment: UNICRON_KMSG names the kernel log,
    UNICRON_NODE_EVENTS=0 turns the watch off, UNICRON_LINKS replaces /sys/class. Never raises."""
    options, classifier = loaded.agent, loaded.classifier()
    options.kmsg = environment.get("UNICRON_KMSG") or options.kmsg or KMSG
    if environment.get("UNICRON_NODE_EVENTS") == "0":
        options.node_events = False
    links = environment.get("UNICRON_LINKS")
    return NodeWatch(warn, options, classifier, Path(links) if links else None)
