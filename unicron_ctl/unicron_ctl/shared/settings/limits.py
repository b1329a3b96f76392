"""Checks the ranges of settings, and the rules between settings and fixed limits.

`unicrond --check` tests the rules of settings together, so that it can name every contradiction at once. CONSTANT_RULES
are about constants of programs that do not import each other; a test checks them.
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
    """The range of a number, both ends included."""

    low: float
    high: float
    zero: bool = False  # 0 is also allowed, and switches the setting off
    why: str = ""

    def __str__(self) -> str:
        return f"{number(self.low)} to {number(self.high)}" + (", or 0 for none" if self.zero else "")

    def problem(self, name: str, value: float) -> str:
        """Return what is wrong with the value, or nothing."""
        if self.low <= value <= self.high or (self.zero and value == 0):
            return ""
        return f"{name} = {number(value)} must be {self}" + (f": {self.why}" if self.why else "")


class Rule(NamedTuple):
    """A rule: `low` must be below `high`. Each side is a sum of names: a field of [controller], `lease`, or a key of
    FIXED_LIMITS or VARIABLES."""

    low: str
    high: str
    why: str
    equal: bool = False  # they may be equal
    slurm: bool = False  # only for a controller with Slurm


FIXED_LIMITS = {"PLANNED_SECONDS": PLANNED_SECONDS, "ORPHAN_SECONDS": ORPHAN_SECONDS}
# Variables of jobs and their defaults. A site that sets one for all its jobs sets it for unicrond as well.
VARIABLES = {
    "UNICRON_PLAN_TIMEOUT": time_limits.PLAN_TIMEOUT,
    "UNICRON_COLLECTIVE_TIMEOUT": time_limits.COLLECTIVE_TIMEOUT,
}

FENCES = Range(5.0, DAY, why="the others must be asked in time when the controller is away")
HEARTBEATS = Range(0.01, 60.0, why="agents refuse anything else")

RULES: tuple[Rule, ...] = (
    Rule("repeat_seconds", "report_timeout", "a lost message is repeated first"),
    Rule("lease", "enter_timeout", "a lost node is found by its lease first", equal=True),
    Rule("lease", "report_timeout", "a lost node is found by its lease first", equal=True),
    Rule("fence_seconds", "state_wait_seconds", "processes that end by themselves are waited for less than others"),
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

OWNERS = {
    "controller": "unicron_ctl.controller",
    "log": "unicron_ctl.shared.log",
    "agent": "unicron_ctl.agent",
    "node": "unicron_ctl.nodes",
    "consensus": "unicron_ctl.shared.consensus",
    "settings": "unicron_ctl.shared.settings",
    "protocol": "unicron_ctl.shared.protocol",
    "process": "unicron_ctl.shared.system",
    "rank": "unicron_transition",
    "prolog": "slurm_plugin/prolog.d/50-unicron",
    "health": "slurm_plugin/health/unicron-health",
    "service": "slurm_plugin/systemd/unicrond.service",
}
"""The package or file that has the constants of CONSTANT_RULES."""
SLURM_DEFAULTS = {"slurm.KillWait": 30.0, "slurm.BatchStartTimeout": 10.0, "slurm.HealthCheckProgram": 60.0}
"""Seconds (slurm.conf(5))."""

CONSTANT_RULES: tuple[Rule, ...] = (
    Rule("agent.SILENT_SECONDS + agent.AGAIN_SECONDS", "controller.FETCH_SECONDS", "what failed is tried again"),
    Rule("controller.FETCH_SECONDS", "agent.FAILING_SECONDS", "while a job waits, the agent that failed is asked last"),
    Rule("controller.CUT_SECONDS", "controller.CUT_LIMIT_SECONDS", "copies take their time"),
    Rule("agent.TOUCH_SECONDS", "agent.FORGOTTEN_SECONDS", "what is in use must not look forgotten"),
    Rule(
        "agent.REACH_SECONDS + agent.REACH_SECONDS + agent.PASS_SECONDS + agent.EARLY_SECONDS",
        "consensus.LEAST_DOORS_SECONDS",
        "the others' doors are tried again before a lease is over",
    ),
    Rule("agent.EARLY_SECONDS", "consensus.END_SECONDS", "killed processes are gone by the end of the lease"),
    Rule("agent.REACH_SECONDS", "controller.ANSWER_SECONDS", "a witness has tried by then"),
    Rule("agent.REACH_SECONDS", "controller.SURVEY_SECONDS", "all have tried by then"),
    Rule("controller.ANSWER_SECONDS", "controller.ROUND_SECONDS", "answers come within their round"),
    Rule("agent.REGISTER_SECONDS", "agent.REGISTER_TIMEOUT", "a lost registration is repeated"),
    Rule("controller.CONFIRM_SECONDS", "agent.REGISTER_TIMEOUT", "a Slurm that hangs must not cost protection"),
    Rule("protocol.TIME_LIMIT + protocol.TIME_LIMIT", "agent.REGISTER_TIMEOUT", "munge may be slow on both sides"),
    Rule("protocol.LEAST_PROGRESS", "controller.PROGRESS_SECONDS", "agents refuse anything else"),
    Rule("agent.ENDING_SECONDS", "slurm.KillWait", "the agent has to report the end before Slurm kills it"),
    Rule(
        "agent.OWN_END_SECONDS + agent.STOP_SECONDS",
        "settings.PLANNED_SECONDS",
        "a loss is answered faster than a plan",
    ),
    Rule("agent.ANSWER_SECONDS", "agent.HUNG_SECONDS", "a slow fork is not a dead template"),
    Rule("consensus.TELL_SECONDS", "consensus.AWAY_SECONDS", "all ask the controller before they agree"),
    Rule("controller.STALL_SECONDS", "consensus.AWAY_SECONDS", "a controller knows that it was away"),
    Rule("consensus.RESEND_SECONDS", "consensus.BALLOT_SECONDS", "a lost message is repeated first"),
    Rule("consensus.REST_SECONDS", "rank.PLAN_TIMEOUT", "stopped ranks wait for those that stop late"),
    Rule("rank.CONNECT_SECONDS", "rank.ENTER_TIMEOUT", "several tries"),
    Rule("rank.ENTER_TIMEOUT", "rank.COLLECTIVE_TIMEOUT", "quick to give up while connecting, patient in training"),
    Rule("rank.COLLECTIVE_TIMEOUT", "rank.BOUNDARY_TIMEOUT", "a newcomer waits for a whole iteration"),
    Rule("node.REPORT_SECONDS", "node.BUDGET_SECONDS", "the report is part of the checks' time"),
    Rule("prolog.UNICRON_HEALTH_SECONDS", "slurm.BatchStartTimeout", "a batch job starts after its prolog"),
    Rule("health.UNICRON_HEALTH_SECONDS", "slurm.HealthCheckProgram", "slurmd kills it then"),
    Rule("log.BUSY_SECONDS", "service.WatchdogSec", "a locked event log is not a stalled loop"),
    Rule(
        "log.LOST_SECONDS + log.LEASE_SECONDS + log.RENEW_SECONDS",
        "agent.OUTLIVED_SECONDS",
        "who still speaks then was not taken over",
    ),
    Rule("process.CONNECTIONS", "service.LimitNOFILE", "each connection is an open file"),
)


def number(value: float) -> str:
    """Format the number without exponent or trailing zeros."""
    return format(value, ".10g")


def fixed_values(environment: Mapping[str, str]) -> tuple[dict[str, float], list[str]]:
    """Return the values of FIXED_LIMITS and VARIABLES by name, and the problems of those that the environment sets."""
    values, problems = {**FIXED_LIMITS, **VARIABLES}, []
    for name in VARIABLES:
        if text := environment.get(name):
            try:
                values[name] = float(text)
            except ValueError:
                values[name] = math.nan
            if not 0 <= values[name] < math.inf:
                del values[name]
                problems.append(f"{name} = {text!r} must be a number of seconds, 0 or more")
    return values, problems


def contradictions(values: Mapping[str, float], slurm: bool = True, rules: Iterable[Rule] = RULES) -> list[str]:
    """Return every rule that is broken, in one line each. A rule with a name that has no value is left out."""
    broken = []
    for rule, low, high in _applicable(rules, values, slurm):
        if low < high or (rule.equal and low == high):
            continue
        # Name first what the reader can change: a setting, and of two settings the larger.
        if _settable(rule.high) or not _settable(rule.low):
            subject, words, other = (rule.high, high), "at least" if rule.equal else "above", (rule.low, low)
        else:
            subject, words, other = (rule.low, low), "at most" if rule.equal else "below", (rule.high, high)
        broken.append(f"{_text(*subject)} must be {words} {_text(*other)}: {rule.why}")
    return broken


def rule_lines(values: Mapping[str, float], slurm: bool = True) -> list[str]:
    """Return the rules of settings with their values, in one line each."""
    return [
        f"{_text(rule.low, low)} {'<=' if rule.equal else '<'} {_text(rule.high, high)}: {rule.why}"
        for rule, low, high in _applicable(RULES, values, slurm)
    ]


def names(side: str) -> list[str]:
    """Return the names in one side of a rule."""
    return side.split(" + ")


def label(side: str) -> str:
    """Return one side of a rule in an admin's words."""
    return "heartbeat_period x lease_periods" if side == "lease" else side


def _applicable(rules: Iterable[Rule], values: Mapping[str, float], slurm: bool) -> Iterable[tuple[Rule, float, float]]:
    for rule in rules:
        wanted = (*names(rule.low), *names(rule.high))
        if all(name in values for name in wanted) and (slurm or not rule.slurm):
            low, high = (sum(values[name] for name in names(side)) for side in (rule.low, rule.high))
            yield rule, low, high


def _settable(side: str) -> bool:
    return any(name not in FIXED_LIMITS and name not in VARIABLES for name in names(side))


def _text(side: str, value: float) -> str:
    return f"{label(side)} = {number(value)}"
