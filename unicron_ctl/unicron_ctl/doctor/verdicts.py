"""What a check says."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Literal, NamedTuple

import msgspec

from unicron_ctl.doctor.facts import HostFacts, Ports, SiteFacts

Verdict = Literal["problem", "advice", "unknown", "good"]
PROBLEM: Verdict = "problem"  # Unicron does less than its documents say, or nothing
ADVICE: Verdict = "advice"  # it works; this would be better
UNKNOWN: Verdict = "unknown"  # it could not be checked
GOOD: Verdict = "good"


class Finding(msgspec.Struct, frozen=True):
    """One result. do: the command or the line that mends it, "" for what is good."""

    verdict: Verdict
    text: str
    do: str = ""


class Case(NamedTuple):
    """What a check judges. host: the host in question. first: the host on which the doctor was started; the same host
    when it judges only that one. ports: None unless the nodes were asked."""

    host: HostFacts
    first: HostFacts
    site: SiteFacts
    ports: Ports | None = None


class Check(NamedTuple):
    """One check. roles: hosts on which it makes sense; none for a check of the whole cluster, which is judged once.
    judge: yields what it finds."""

    name: str
    roles: frozenset[str]
    judge: Callable[[Case], Iterator[Finding]]


def good(text: str) -> Finding:
    return Finding(GOOD, text)


def problem(text: str, do: str) -> Finding:
    return Finding(PROBLEM, text, do)


def advice(text: str, do: str) -> Finding:
    return Finding(ADVICE, text, do)


def unknown(text: str, do: str = "") -> Finding:
    return Finding(UNKNOWN, text, do)
