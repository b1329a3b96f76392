"""Checks of Slurm as a whole: each is judged once, whatever host asks. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from unicron.ctl.doctor.slurm_lines import ADMINISTRATOR, WANTED, administrator
from unicron.ctl.doctor.verdicts import Case, Finding, advice, good, problem, unknown
from unicron.ctl.settings.limits import PLANNED_SECONDS, number
from unicron.ctl.settings.partitions import ACT, DEFAULT
from unicron.ctl.slurm.slurm_settings import NO_LIMIT, SlurmSettings
from unicron.detector.words import counted

SUPER_USER = "root"
PROLOG_REST = 4  # seconds: all that prolog.d/50-unicron does besides the admission checks, at most
CRED_EXPIRE = 120.0  # Slurm's default, seconds


def slurm(case: Case) -> Iterator[Finding]:
    """Slurm answers."""
    if case.site.slurm_problem:
        yield problem(
            f"{case.site.slurm_problem}; what depends on its settings was not checked",
            "see `scontrol ping`; a host without slurm.conf needs sackd, slurmd or SLURM_CONF",
        )
    else:
        yield good(f"Slurm {case.site.settings.release}, {counted(len(case.site.nodes), 'node')}")


def auth_type(case: Case) -> Iterator[Finding]:
    """How Slurm knows its users."""
    kind = case.site.settings.text("AuthType")
    if kind == "auth/munge":
        yield good(kind)
    elif kind == "auth/slurm":
        yield good("auth/slurm: Slurm needs no munge. Unicron does: munged on all hosts")
    else:
        yield problem(f"AuthType={kind or 'none'}: everybody can be everybody", "AuthType=auth/munge in slurm.conf")


def admin_level(case: Case) -> Iterator[Finding]:
    """The controller's user may change nodes."""
    site = case.site
    name, (slurms, _) = site.controller_name, site.settings.user()
    has_accounts = "slurmdbd" in site.settings.text("AccountingStorageType")
    if not name or site.level_problem:
        yield unknown(site.level_problem or "the controller's user is not known")
        return
    if name in (SUPER_USER, slurms) or site.admin_level == ADMINISTRATOR:
        yield good(f"{name} may change nodes")
        return
    acts = any(site.config.controller.rules(one.name).mode == ACT for one in site.partitions)
    weigh, later = (problem, "") if acts else (advice, "; this must be so before a partition acts")
    if has_accounts:
        yield weigh(
            f"{name} is {'an ' + site.admin_level if site.admin_level not in ('', 'None') else 'no administrator'}: "
            f"Slurm refuses every change of a node{later}",
            administrator(name, site.admin_level),
        )
    else:
        yield weigh(
            f"without slurmdbd only root and SlurmUser may change nodes, and the controller is {name}'s{later}",
            f"User={slurms or 'slurm'} in unicrond.service",
        )


def job_requeue(case: Case) -> Iterator[Finding]:
    """JobRequeue is on."""
    return _lines(case, "job-requeue", "a job that lost a node is not started again unless it asks for that")


def return_to_service(case: Case) -> Iterator[Finding]:
    """ReturnToService is 1."""
    settings = case.site.settings
    text = (
        "a node that was set down comes back without its checks"
        if settings.text("ReturnToService") == "2"
        else "a node that was lost does not come back by itself"
    )
    return _lines(case, "return-to-service", text)


def prolog_flags(case: Case) -> Iterator[Finding]:
    """PrologFlags has Alloc, and nothing that lets jobs begin before their prolog has ended."""
    if "nohold" in map(str.lower, case.site.settings.words("PrologFlags")):
        yield problem(
            "PrologFlags has NoHold: jobs begin before their node is checked", "take NoHold out of slurm.conf"
        )
        return
    yield from _lines(case, "prolog-flags", "nodes of a job beyond its first are checked only when a step starts there")


def prolog_failure(case: Case) -> Iterator[Finding]:
    """A job is not held because its prolog found a bad node."""
    return _lines(case, "prolog-failure", "if a node is proven bad by the prolog, its job is held")


def _lines(case: Case, check: str, text: str) -> Iterator[Finding]:
    """What slurm.conf lacks for this check."""
    settings = case.site.settings
    wanted = [one for one in WANTED if one.check == check]
    missing = [line for one in wanted if (line := one.line(settings))]
    if missing:
        yield problem(text, f"{'; '.join(missing)} in slurm.conf")
    else:
        yield good(", ".join(f"{one.name}={settings.text(one.name)}" for one in wanted))


class Step(NamedTuple):
    """One rung of the ladder: `low` must be below `high`. Names with their values in seconds; None: not known."""

    low: tuple[str, float | None]
    high: tuple[str, float | None]
    why: str
    do: str


def time_outs(case: Case) -> Iterator[Finding]:
    """Slurm's time-outs fit each other and Unicron's."""
    sound = True
    for step in ladder(case):
        (low, below), (high, above) = step.low, step.high
        if below is None or above is None or below <= above:
            continue
        sound = False
        yield problem(f"{low} = {number(below)} s must be at most {high} = {number(above)} s: {step.why}", step.do)
    if case.site.settings.seconds("SlurmdTimeout") == 0:
        sound = False
        yield problem(
            "SlurmdTimeout = 0: Slurm never sets a silent node down, so an element there is never started elsewhere",
            "SlurmdTimeout=300 in slurm.conf",
        )
    if sound:
        yield good("the time-outs fit each other")


def ladder(case: Case) -> list[Step]:
    """The rungs, with this cluster's values."""
    settings, ours = case.site.settings, case.site.config.controller
    prolog = float(case.host.health.seconds + PROLOG_REST)
    kill, silent = settings.seconds("KillWait"), settings.seconds("SlurmdTimeout")
    expire = _expire(settings)
    return [
        Step(
            ("the prolog", prolog),
            ("BatchStartTimeout", settings.seconds("BatchStartTimeout")),
            "Slurm takes a job for lost while its node is checked",
            f"BatchStartTimeout={number(prolog + 2)} in slurm.conf, or UNICRON_HEALTH_SECONDS in prolog.conf",
        ),
        Step(
            ("the prolog", prolog),
            ("PrologTimeout", _prolog_limit(settings)),
            "Slurm kills the prolog and drains the node",
            f"PrologTimeout={number(prolog + 2)} in slurm.conf",
        ),
        Step(
            ("the prolog", prolog),
            ("cred_expire", expire),
            "a job's credential expires before it begins",
            f"cred_expire={number(CRED_EXPIRE)} in AuthInfo of slurm.conf",
        ),
        Step(
            ("BatchStartTimeout", settings.seconds("BatchStartTimeout")),
            ("cred_expire", expire),
            "a job's credential expires while Slurm waits for it to begin",
            f"cred_expire={number(CRED_EXPIRE)} in AuthInfo of slurm.conf",
        ),
        Step(
            ("a script's time to save its state", PLANNED_SECONDS),
            ("KillWait", kill),
            "Slurm kills a rank in restart mode before it has saved its state",
            "KillWait=30 in slurm.conf",
        ),
        Step(
            ("KillWait", kill),
            ("[controller] isolate_seconds", ours.isolate_seconds),
            "Unicron repeats its request while Slurm still ends the element",
            f"isolate_seconds = {number(2 * (kill or 0))} in [controller]",
        ),
        Step(
            ("[controller] lease", ours.lease),
            ("SlurmdTimeout", silent or None),
            "Slurm sets a silent node down before Unicron has looked at it",
            "SlurmdTimeout=300 in slurm.conf",
        ),
        Step(
            ("MessageTimeout", settings.seconds("MessageTimeout")),
            ("[controller] slurm_timeout", ours.slurm_timeout),
            "Unicron gives a command up while Slurm still works on it",
            f"slurm_timeout = {number(settings.seconds('MessageTimeout') or 0)} in [controller]",
        ),
        Step(
            ("[controller] slurm_poll_seconds + slurm_timeout", ours.slurm_poll_seconds + ours.slurm_timeout),
            ("MinJobAge", settings.seconds("MinJobAge")),
            "Slurm forgets a job before Unicron has seen its end",
            "MinJobAge=300 in slurm.conf",
        ),
    ]


def _expire(settings: SlurmSettings) -> float:
    text = settings.option("AuthInfo", "cred_expire")
    return float(text) if text.isdecimal() else CRED_EXPIRE


def _prolog_limit(settings: SlurmSettings) -> float | None:
    """Slurm's limit for a prolog; None without one. Newer releases have one of its own for each hook."""
    for name in ("PrologTimeout", "PrologEpilogTimeout"):
        if found := settings.seconds(name):
            return None if found >= NO_LIMIT else found
    return None


def partitions(case: Case) -> Iterator[Finding]:
    """Slurm has the partitions that unicron.toml names."""
    known = {one.name for one in case.site.partitions}
    named = case.site.config.controller.partitions.keys() - {DEFAULT}
    for name in sorted(named - known):
        yield problem(
            f"[partition.{name}]: Slurm has no such partition", f"name one of {', '.join(sorted(known)) or 'none'}"
        )
    if named <= known:
        modes = {one.name: case.site.config.controller.rules(one.name).mode for one in case.site.partitions}
        yield good(", ".join(f"{name}: {mode}" for name, mode in modes.items()))
