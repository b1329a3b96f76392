"""Runs the checks in parallel, each within its time, and makes one report of them."""

from __future__ import annotations

import dataclasses
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from unicron_detector.health.checks import CHECKS, Settings
from unicron_detector.health.findings import BAD, GOOD, UNKNOWN, WARNING, Finding

SKIP_WORD = "skipped"


@dataclass(frozen=True)
class Result:
    """One check's answer."""

    name: str
    verdict: str  # good, warning, unknown, bad or skipped
    reason: str
    seconds: float
    values: Mapping[str, object]

    def as_dict(self) -> dict[str, object]:
        return {**dataclasses.asdict(self), "seconds": round(self.seconds, 4)}


@dataclass(frozen=True)
class Report:
    """All checks of a node."""

    node: str
    results: tuple[Result, ...]
    seconds: float

    @property
    def verdict(self) -> str:
        """The verdict on the node: "bad" only if a check proved it."""
        verdicts = {result.verdict for result in self.results}
        return next((verdict for verdict in (BAD, WARNING, UNKNOWN) if verdict in verdicts), GOOD)

    @property
    def reason(self) -> str:
        """The reason of the verdict in one line, for a drain or a log.

        A warning hides no check without an answer, since one that hangs at every run would never be seen.
        """
        shown = (WARNING, UNKNOWN) if self.verdict == WARNING else (self.verdict,)
        telling = [f"{one.name}: {one.reason}" for word in shown for one in self.results if one.verdict == word]
        return "; ".join(telling) if self.verdict != GOOD else "all checks passed"

    def as_dict(self) -> dict[str, object]:
        return {
            "node": self.node,
            "verdict": self.verdict,
            "reason": self.reason,
            "seconds": round(self.seconds, 4),
            "checks": [result.as_dict() for result in self.results],
        }


def run(settings: Settings, checks: Mapping[str, Callable[[Settings], Finding]] = CHECKS) -> Report:
    """Run the checks, each in its own thread with ``settings.timeout`` seconds.

    A check that raises, or does not answer in time, is "unknown". The latter's thread is left behind (a hung file
    system cannot be interrupted), so the caller should end by ``os._exit``.
    """
    start = time.perf_counter()
    jobs = [_Job(name, check, settings) for name, check in checks.items()]
    for job in jobs:
        job.start()
    results = tuple(job.result(start + settings.timeout) for job in jobs)
    return Report(os.environ.get("SLURMD_NODENAME") or socket.gethostname(), results, time.perf_counter() - start)


class _Job:
    """One check in its thread."""

    def __init__(self, name: str, check: Callable[[Settings], Finding], settings: Settings) -> None:
        self._name, self._check, self._settings = name, check, settings
        self._answer: tuple[Finding, float] | None = None
        self._thread = threading.Thread(target=self._work, name=f"health-{name}", daemon=True)
        self._off = name in settings.skip or "all" in settings.skip

    def start(self) -> None:
        if not self._off:
            self._thread.start()

    def _work(self) -> None:
        start = time.perf_counter()
        try:
            finding = self._check(self._settings)
        except Exception as error:  # a check's own mistake must never take the node down
            finding = Finding(UNKNOWN, f"the check itself failed: {type(error).__name__}: {error}")
        self._answer = (finding, time.perf_counter() - start)

    def result(self, until: float) -> Result:
        if self._off:
            return Result(self._name, SKIP_WORD, "switched off", 0.0, {})
        self._thread.join(max(0.0, until - time.perf_counter()))
        if self._answer is None:
            limit = self._settings.timeout
            return Result(self._name, UNKNOWN, f"no answer within {limit:g} s", limit, {})
        finding, seconds = self._answer
        return Result(self._name, finding.verdict, finding.reason, seconds, finding.values)
