"""Runs the checks side by side, each within its time, and makes one report of them."""

from __future__ import annotations

import dataclasses
import os
import socket
import threading
import time
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unicron.detector.health.checks import BAD, CHECKS, GOOD, UNKNOWN, WARNING, Finding, Settings

SKIPPED = "skipped"


@dataclass(frozen=True)
class Result:
    """One check's answer. ``verdict``: good, warning, unknown, bad or skipped. ``seconds``: what it took."""

    name: str
    verdict: str
    reason: str
    seconds: float
    values: Mapping[str, object]

    def as_dict(self) -> dict[str, object]:
        return {**dataclasses.asdict(self), "seconds": round(self.seconds, 4)}


@dataclass(frozen=True)
class Report:
    """All checks of a node. ``verdict`` is "bad" only if a check proved it."""

    node: str
    results: tuple[Result, ...]
    seconds: float

    @property
    def verdict(self) -> str:
        verdicts = {result.verdict for result in self.results}
        return next((verdict for verdict in (BAD, WARNING, UNKNOWN) if verdict in verdicts), GOOD)

    @property
    def reason(self) -> str:
        """What stands behind the verdict, in one line: what a drain reason or a log needs."""
        telling = [f"{result.name}: {result.reason}" for result in self.results if result.verdict == self.verdict]
        return "; ".join(telling) if self.verdict != GOOD else "all checks passed"

    def as_dict(self) -> dict[str, object]:
        return {
            "node": self.node,
            "verdict": self.verdict,
            "reason": self.reason,
            "seconds": round(self.seconds, 4),
            "checks": [result.as_dict() for result in self.results],
        }


def load_settings(config: Mapping[str, object] | str | Path | None = None, **overrides: object) -> Settings:
    """Settings from ``[health]`` of a TOML file or a mapping, then from keyword overrides that are not None.

    Raises ValueError with one line for an unknown key or a wrong type, OSError for an unreadable file.
    """
    values: dict[str, object] = {}
    severity: Mapping[str, object] = {}
    if isinstance(config, str | Path):
        with open(config, "rb") as file:
            try:
                config = tomllib.load(file)
            except tomllib.TOMLDecodeError as error:
                raise ValueError(f"{file.name} is not TOML: {error}") from None
    if config:
        section = config.get("health", {})
        if not isinstance(section, Mapping):
            raise ValueError("[health] must be a table")
        values.update(section)
        rules = config.get("severity", {})
        if not isinstance(rules, Mapping):
            raise ValueError("[severity] must be a table")
        severity = rules
        if "severity" in values:
            raise ValueError("[health] has no key 'severity': it is a table of its own")
    values.update({key: value for key, value in overrides.items() if value is not None})
    checked: dict[str, Any] = {key: _checked(key, value) for key, value in values.items()}
    return Settings(severity=severity, **checked)


_FIELDS = {item.name: item for item in dataclasses.fields(Settings)}


def _checked(key: str, value: object) -> object:
    if key not in _FIELDS:
        raise ValueError(f"[health] has no key {key!r}; it knows {', '.join(sorted(_FIELDS))}")
    kind = str(_FIELDS[key].type)
    if kind.startswith("tuple"):
        if not isinstance(value, list | tuple) or any(not isinstance(item, str) for item in value):
            raise ValueError(f"[health] {key} must be a list of texts, not {value!r}")
        return tuple(value)
    if kind == "str":
        if not isinstance(value, str):
            raise ValueError(f"[health] {key} must be a text, not {value!r}")
        return value
    if isinstance(value, bool) or not isinstance(value, int | float) or value < 0:
        raise ValueError(f"[health] {key} must be a number, not {value!r}")
    return value


def run(
    settings: Settings | None = None,
    only: tuple[str, ...] = (),
    checks: Mapping[str, Callable[[Settings], Finding]] = CHECKS,
) -> Report:
    """Runs the checks (all, or those in ``only``), each in a thread of its own with ``settings.timeout`` seconds.

    A check that does not answer in time is "unknown": its thread is left behind (a hung file system cannot be
    interrupted), so the caller should end by ``os._exit``. A check that raises is "unknown", too. Raises KeyError for
    an unknown name in ``only``.
    """
    settings = settings or Settings()
    for name in only:
        checks[name]
    start = time.perf_counter()
    jobs = [_Job(name, checks[name], settings) for name in checks if not only or name in only]
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
        except Exception as error:  # a check must never take the node down by a mistake of its own
            finding = Finding(UNKNOWN, f"the check itself failed: {type(error).__name__}: {error}")
        self._answer = (finding, time.perf_counter() - start)

    def result(self, until: float) -> Result:
        if self._off:
            return Result(self._name, SKIPPED, "switched off", 0.0, {})
        self._thread.join(max(0.0, until - time.perf_counter()))
        if self._answer is None:
            limit = self._settings.timeout
            return Result(self._name, UNKNOWN, f"no answer within {limit:g} s", limit, {})
        finding, seconds = self._answer
        return Result(self._name, finding.verdict, finding.reason, seconds, finding.values)
