"""Checks of Slurm as a whole, each of which is judged once. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from unicron_ctl.doctor.facts import Case, Finding, advice, good, problem, unknown
from unicron_ctl.doctor.slurm_lines import ADMINISTRATOR, CONF_LINES, administrator
from unicron_ctl.shared.settings.limits import PLANNED_SECONDS, RULES, names, number
from unicron_ctl.shared.settings.partitions import ACT, DEFAULT
from unicron_ctl.shared.slurm.slurm_settings import NO_LIMIT, SlurmSettings
from unicron_detector.words import plural

SUPER_USER = "root"
PROLOG_REST = 4  # seconds: the most that prolog.d/50-unicron takes besides the admission checks
CRED_EXPIRE = 120.0  # seconds: Slurm's default


def slurm(case: Case) -> Iterator[Finding]:
    """Slurm answers."""
    if case.site.slurm_problem:
        yield problem(
            f"{case.site.slurm_problem}; what depends on its settings was not checked",
            "see `scontrol ping`; a host without slurm.conf needs sackd, slurmd or SLURM_CONF",
        )
    else:
        yield good(f"Slurm {case.site.settings.release}, {plural(len(case.site.nodes), 'node')}")


def auth_type(case: Case) -> Iterator[Finding]:
    """Slurm knows its users by munge."""
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
    if not name or site.level_problem:
        yield unknown(site.level_problem or "the controller's user is not known")
        return
    if name in (SUPER_USER, slurms) or site.admin_level == ADMINISTRATOR:
        yield good(f"{name} may change nodes")
        return
    acts = any(site.config.controller.rules(one.name).mode == ACT for one in site.partitions)
    weigh, later = (problem, "") if acts else (advice, "; this must be so before a partition acts")
    if "slurmdbd" in site.settings.text("AccountingStorageType"):
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
    return _missing_lines(case, "job-requeue", "a job that lost a node is not started again unless it asks for that")


def return_to_service(case: Case) -> Iterator[Finding]:
    """ReturnToService is 1."""
    settings = case.site.settings
    text = (
        "a node that was set down comes back without its checks"
        if settings.text("ReturnToService") == "2"
        else "a node that was lost does not come back by itself"
    )
    return _missing_lines(case, "return-to-service", text)


def prolog_flags(case: Case) -> Iterator[Finding]:
    """PrologFlags has Alloc, and nothing that lets jobs begin before their prolog has ended."""
    if "nohold" in map(str.lower, case.site.settings.words("PrologFlags")):
        yield problem(
            "PrologFlags has NoHold: jobs begin before their node is checked", "take NoHold out of slurm.conf"
        )
        return
    text = "nodes of a job beyond its first are checked only when a step starts there"
    yield from _missing_lines(case, "prolog-flags", text)


def prolog_failure(case: Case) -> Iterator[Finding]:
    """A job is not held because its prolog found a bad node."""
    return _missing_lines(case, "prolog-failure", "if a node is proven bad by the prolog, its job is held")


def _missing_lines(case: Case, check: str, text: str) -> Iterator[Finding]:
    """Yield a problem with the lines that slurm.conf lacks for this check."""
    settings = case.site.settings
    wanted = [one for one in CONF_LINES if one.check == check]
    missing = [line for one in wanted if (line := one.line(settings))]
    if missing:
        yield problem(text, f"{'; '.join(missing)} in slurm.conf")
    else:
        yield good(", ".join(f"{one.name}={settings.text(one.name)}" for one in wanted))


class Step(NamedTuple):
    """A rule of the ladder of time-outs, with names of :func:`limits`. It is skipped if a value is not known."""

    low: tuple[str, ...]
    high: str
    """Must be at least the sum of `low`."""
    why: str
    """The consequence if it is not."""
    below: bool = False
    """Whether the sum must be less than `high`."""


_SAVES = "a script's time to save its state"
LADDER: tuple[Step, ...] = (
    Step(("the prolog",), "BatchStartTimeout", "Slurm takes a job for lost while its node is checked"),
    Step(("the prolog",), "PrologTimeout", "Slurm kills the prolog and drains the node"),
    Step(("the prolog",), "cred_expire", "a job's credential expires before it begins"),
    Step(("BatchStartTimeout",), "cred_expire", "a job's credential expires while Slurm waits for it to begin"),
    Step((_SAVES,), "KillWait", "Slurm kills a rank in restart mode before it has saved its state"),
    Step(("KillWait",), "isolate_seconds", "Unicron repeats its request while Slurm still ends the element"),
    Step(("lease",), "SlurmdTimeout", "Slurm sets a silent node down before Unicron has looked at it"),
    Step(("MessageTimeout",), "slurm_timeout", "Unicron gives a command up while Slurm still works on it"),
    Step(("slurm_poll_seconds", "slurm_timeout"), "MinJobAge", "Slurm forgets a job before Unicron has seen its end"),
)
_RUNGS = (*LADDER, *(Step(tuple(names(rule.low)), rule.high, rule.why, not rule.equal) for rule in RULES))
OURS = ("lease", "isolate_seconds", "slurm_timeout", "slurm_poll_seconds")
# The names that may be raised if they are too low, each to at least this value.
USUAL = {
    "BatchStartTimeout": 10.0,
    "PrologTimeout": 0.0,
    "cred_expire": CRED_EXPIRE,
    "KillWait": 30.0,
    "isolate_seconds": 300.0,
    "SlurmdTimeout": 300.0,
    "slurm_timeout": 10.0,
    "MinJobAge": 300.0,
}
ROOM = 2.0  # seconds by which a value is raised above the sum that it must hold


def time_outs(case: Case) -> Iterator[Finding]:
    """Slurm's time-outs fit each other and Unicron's. unicrond accepts the values that the findings propose."""
    settings, known = case.site.settings, limits(case)
    better, broken = sufficient_values(known), [step for step in LADDER if _is_broken(step, known)]
    more = [name for name in better if better[name] != known[name] and name not in {step.high for step in broken}]
    for step in broken:
        low, below = " + ".join(map(_label, step.low)), sum(known[name] for name in step.low)
        follow = [rung.high for rung in _RUNGS if rung.high in more and step.high in rung.low]
        more = [name for name in more if name not in follow]
        do = [_line(settings, name, better[name]) for name in dict.fromkeys((step.high, *follow))]
        if step.high == "BatchStartTimeout":
            do[0] += ", or UNICRON_HEALTH_SECONDS in prolog.conf"
        high = f"{_label(step.high)} = {number(known[step.high])}"
        yield problem(f"{low} = {number(below)} s must be at most {high} s: {step.why}", "; with it ".join(do))
    if settings.seconds("SlurmdTimeout") == 0:
        yield problem(
            "SlurmdTimeout = 0: Slurm never sets a silent node down, so an element there is never started elsewhere",
            "SlurmdTimeout=300 in slurm.conf",
        )
    elif not broken:
        yield good("the time-outs fit each other")


def limits(case: Case) -> dict[str, float]:
    """Return the values of the ladder's names in seconds, as far as they are known."""
    settings, ours = case.site.settings, case.site.config.controller
    found = {
        "the prolog": float(case.host.health.seconds + PROLOG_REST),
        _SAVES: PLANNED_SECONDS,
        "PrologTimeout": _prolog_limit(settings),
        "cred_expire": _expire(settings),
        "SlurmdTimeout": settings.seconds("SlurmdTimeout") or None,
        **{name: settings.seconds(name) for name in ("BatchStartTimeout", "KillWait", "MessageTimeout", "MinJobAge")},
        **{name: getattr(ours, name) for name in OURS},
    }
    return {name: value for name, value in found.items() if value is not None}


def sufficient_values(known: Mapping[str, float]) -> dict[str, float]:
    """Return values with which all rules of the ladder hold, and unicrond's own rules about the same names."""
    better = dict(known)
    for _ in _RUNGS:  # each round raises a value that another rule depends on
        for step in _RUNGS:
            if step.high in USUAL and _is_broken(step, better):
                better[step.high] = max(USUAL[step.high], sum(better[name] for name in step.low) + ROOM)
    return better


def _is_broken(step: Step, known: Mapping[str, float]) -> bool:
    if not all(name in known for name in (*step.low, step.high)):
        return False
    low = sum(known[name] for name in step.low)
    return low > known[step.high] or (step.below and low == known[step.high])


def _label(name: str) -> str:
    return f"[controller] {name}" if name in OURS else name


def _line(settings: SlurmSettings, name: str, value: float) -> str:
    """Return the line that sets a value, and its file. Older Slurms know only one limit for prolog and epilog."""
    if name in OURS:
        return f"{name} = {number(value)} in [controller]"
    if name == "cred_expire":
        return f"cred_expire={number(value)} in AuthInfo of slurm.conf"
    if name == "PrologTimeout" and not settings.text(name):
        name = "PrologEpilogTimeout"
    return f"{name}={number(value)} in slurm.conf"


def _expire(settings: SlurmSettings) -> float:
    text = settings.option("AuthInfo", "cred_expire")
    return float(text) if text.isdecimal() else CRED_EXPIRE


def _prolog_limit(settings: SlurmSettings) -> float | None:
    """Return Slurm's limit for a prolog; None if it has none. Newer releases have one for each hook."""
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
