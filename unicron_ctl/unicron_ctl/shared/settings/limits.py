"""Ranges of settings, and the rules that settings must keep among themselves and with fixed limits.

`unicrond --check` tests all rules together, so that it can name every contradiction at once. The rules among limits
that nobody can set are in tests/unit/unicron_ctl/shared/settings/test_limits.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from unicron_transition.generations import time_limits

DAY = 86400.0
PLANNED_SECONDS = 8.0
"""A restart-mode rank has this long between SIGTERM and SIGKILL when no node is lost: time to save its state."""
ORPHAN_SECONDS = 600.0
"""An element with a dead rank ends after this long without the controller."""


class Range(NamedTuple):
    """The values that a number may have, both ends included; `zero` allows 0 as well, which switches it off."""

    low: float
    high: float
    zero: bool = False
    why: str = ""

    def __str__(self) -> str:
        return f"{number(self.low)} to {number(self.high)}" + (", or 0 for none" if self.zero else "")

    def problem(self, name: str, value: float) -> str:
        """What is wrong with the value, or nothing."""
        if self.low <= value <= self.high or (self.zero and value == 0):
            return ""
        return f"{name} = {number(value)} must be {self}" + (f": {self.why}" if self.why else "")


class Rule(NamedTuple):
    """`low` must be below `high`, or at most equal where `equal` says so. Each side is a sum of names: a field of
    [controller], `lease`, or a key of FIXED or VARIABLES. `slurm`: only for a controller with Slurm."""

    low: str
    high: str
    why: str
    equal: bool = False
    slurm: bool = False


FIXED = {"PLANNED_SECONDS": PLANNED_SECONDS, "ORPHAN_SECONDS": ORPHAN_SECONDS}
# Variables of jobs and their defaults. A site that sets one for all its jobs sets it for unicrond as well.
VARIABLES = {
    "UNICRON_PLAN_TIMEOUT": time_limits.PLAN_TIMEOUT,
    "UNICRON_COLLECTIVE_TIMEOUT": time_limits.COLLECTIVE_TIMEOUT,
}

HEARTBEATS = Range(0.01, 60.0, why="agents refuse anything else")

RULES: tuple[Rule, ...] = (
    Rule("repeat_seconds", "report_timeout", "a lost message is repeated first"),
    Rule("lease", "enter_timeout", "a lost node is found by its lease first", equal=True),
    Rule("lease", "report_timeout", "a lost node is found by its lease first", equal=True),
    Rule("heartbeat_period", "restart_grace", "agents come back at their next heartbeat", equal=True),
    Rule("report_timeout", "regroup_seconds", "survivors that do not stop are found by that first"),
    Rule("fault_grace", "report_timeout", "the cause of a fault must show before survivors are given up"),
    Rule(
        "slurm_poll_seconds + slurm_timeout",
        "isolate_seconds",
        "one command to Slurm may fail by its time-out and be repeated",
        slurm=True,
    ),
    Rule("PLANNED_SECONDS", "report_timeout", "a restart-mode script may take so long to save its state"),
    Rule("restart_grace", "ORPHAN_SECONDS", "agents must still be there when the controller is back"),
    Rule(
        "hang_outside_seconds + report_timeout + enter_timeout + restart_grace",
        "UNICRON_PLAN_TIMEOUT",
        "stopped ranks must not give up while the controller waits for the others, who may be writing a checkpoint",
    ),
    Rule(
        "restart_seconds",
        "UNICRON_PLAN_TIMEOUT",
        "at a job's fewest nodes its stopped ranks wait for the one that is started again",
        equal=True,
    ),
    Rule(
        "hang_outside_seconds", "UNICRON_COLLECTIVE_TIMEOUT", "the others wait in a collective for a rank's checkpoint"
    ),
    Rule("first_iteration_seconds", "UNICRON_COLLECTIVE_TIMEOUT", "the others wait in a collective for a late rank"),
)


def number(value: float) -> str:
    """The number as people write it: no exponent, no trailing zeros."""
    return format(value, ".10g")


def fixed_values(environment: Mapping[str, str]) -> tuple[dict[str, float], list[str]]:
    """The values of FIXED and VARIABLES by name, and what is wrong with those that the environment sets."""
    values, found = {**FIXED, **VARIABLES}, []
    for name in VARIABLES:
        if text := environment.get(name):
            try:
                values[name] = float(text)
            except ValueError:
                values[name] = math.nan
            if not 0 <= values[name] < math.inf:
                del values[name]
                found.append(f"{name} = {text!r} must be a number of seconds, 0 or more")
    return values, found


def contradictions(values: Mapping[str, float], slurm: bool = True) -> list[str]:
    """Every rule that is broken, in one line each. A rule with a name that has no value is left out."""
    found = []
    for rule, low, high in _applicable(values, slurm):
        if low < high or (rule.equal and low == high):
            continue
        # The reader wants to know first what to change: a setting, and of two settings the larger.
        if _settable(rule.high) or not _settable(rule.low):
            subject, words, other = (rule.high, high), "at least" if rule.equal else "above", (rule.low, low)
        else:
            subject, words, other = (rule.low, low), "at most" if rule.equal else "below", (rule.high, high)
        found.append(f"{_text(*subject)} must be {words} {_text(*other)}: {rule.why}")
    return found


def rule_lines(values: Mapping[str, float], slurm: bool = True) -> list[str]:
    """The rules with their values, in one line each."""
    return [
        f"{_text(rule.low, low)} {'<=' if rule.equal else '<'} {_text(rule.high, high)}: {rule.why}"
        for rule, low, high in _applicable(values, slurm)
    ]


def names(side: str) -> list[str]:
    """The names in one side of a rule."""
    return side.split(" + ")


def label(side: str) -> str:
    """One side of a rule as an admin knows it."""
    return "heartbeat_period x lease_periods" if side == "lease" else side


def _applicable(values: Mapping[str, float], slurm: bool) -> Iterable[tuple[Rule, float, float]]:
    for rule in RULES:
        wanted = (*names(rule.low), *names(rule.high))
        if all(name in values for name in wanted) and (slurm or not rule.slurm):
            low, high = (sum(values[name] for name in names(side)) for side in (rule.low, rule.high))
            yield rule, low, high


def _settable(side: str) -> bool:
    return any(name not in FIXED and name not in VARIABLES for name in names(side))


def _text(side: str, value: float) -> str:
    return f"{label(side)} = {number(value)}"
