"""The lines that slurm.conf needs. `unicronctl setup` prints the missing ones, and the doctor checks them."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from unicron_ctl.shared.settings.places import PACKAGE_FOLDER
from unicron_ctl.shared.slurm.slurm_settings import SlurmSettings

HEALTH_PROGRAM = f"{PACKAGE_FOLDER}/unicron-health"
HEALTH_INTERVAL = "300"
HOOK_FOLDER = {"Prolog": f"{PACKAGE_FOLDER}/prolog.d", "Epilog": f"{PACKAGE_FOLDER}/epilog.d"}
HOOK = "50-unicron"
ADMINISTRATOR = "Administrator"


def administrator(user: str, level: str) -> str:
    """Return the command that lets a user change nodes. level: the present AdminLevel, "" if slurmdbd does not know
    the user."""
    if level:
        return f"sacctmgr modify user where name={user} set adminlevel={ADMINISTRATOR}"
    return f"sacctmgr add user {user} account=root adminlevel={ADMINISTRATOR}"


class ConfLine(NamedTuple):
    """A setting of Slurm."""

    name: str
    check: str
    """The doctor's check that it belongs to."""
    line: Callable[[SlurmSettings], str]
    """Returns the line to write, "" if the setting is right."""
    why: str


def _value(name: str, value: str) -> Callable[[SlurmSettings], str]:
    """Require this value."""
    return lambda settings: "" if settings.text(name) == value else f"{name}={value}"


def _with_word(name: str, word: str) -> Callable[[SlurmSettings], str]:
    """Require this word in a list, and keep the others."""

    def line(settings: SlurmSettings) -> str:
        words = settings.words(name)
        return "" if word.lower() in map(str.lower, words) else f"{name}={','.join([*words, word])}"

    return line


def _hook(name: str) -> Callable[[SlurmSettings], str]:
    """Require any program; the doctor checks on the nodes whether it is ours."""
    return lambda settings: "" if settings.words(name) else f"{name}={HOOK_FOLDER[name]}/*"


def _health_program(settings: SlurmSettings) -> str:
    return "" if settings.text("HealthCheckProgram") else f"HealthCheckProgram={HEALTH_PROGRAM}"


def _health_interval(settings: SlurmSettings) -> str:
    return "" if settings.seconds("HealthCheckInterval") else f"HealthCheckInterval={HEALTH_INTERVAL}"


def _health_states(settings: SlurmSettings) -> str:
    words = [word.upper() for word in settings.words("HealthCheckNodeState")] or ["ANY"]
    if "ANY" in words and "START_ONLY" not in words:
        return ""
    cycle = [word for word in words if word == "CYCLE"]
    return f"HealthCheckNodeState={','.join(['ANY', *cycle])}"


CONF_LINES: tuple[ConfLine, ...] = (
    ConfLine("JobRequeue", "job-requeue", _value("JobRequeue", "1"), "a lost element is started again"),
    ConfLine(
        "ReturnToService",
        "return-to-service",
        _value("ReturnToService", "1"),
        "a node that was set down comes back once it has been checked; with 2, before",
    ),
    ConfLine("Prolog", "prolog", _hook("Prolog"), "a node is checked before it gets a job"),
    ConfLine("Epilog", "epilog", _hook("Epilog"), "what a job has left on a node is removed"),
    ConfLine(
        "PrologFlags",
        "prolog-flags",
        _with_word("PrologFlags", "Alloc"),
        "all nodes of a job are checked before it begins, not each at its first step",
    ),
    ConfLine(
        "SchedulerParameters",
        "prolog-failure",
        _with_word("SchedulerParameters", "nohold_on_prolog_fail"),
        "a job whose prolog failed is not held",
    ),
    ConfLine("HealthCheckProgram", "health-check", _health_program, "nodes that are proven bad get no jobs"),
    ConfLine("HealthCheckInterval", "health-check", _health_interval, "seconds between two checks; 0 is never"),
    ConfLine("HealthCheckNodeState", "health-check", _health_states, "down nodes too: they come back by their reports"),
)


def missing(settings: SlurmSettings) -> list[tuple[ConfLine, str]]:
    """Return the lines that slurm.conf lacks or has otherwise, in the table's order."""
    return [(wanted, line) for wanted in CONF_LINES if (line := wanted.line(settings))]
