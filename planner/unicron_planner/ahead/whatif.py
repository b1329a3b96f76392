"""Suppositions in words ("node n3 fails", "node joins", "job gpt-7b finishes") and the scenario if they came true."""

from __future__ import annotations

import re
from dataclasses import replace

from unicron_planner.ahead.next_events import after
from unicron_planner.problem.objective import Job, PlanError, Scenario

EXAMPLES = '"node n3 fails", "a spare fails", "node joins", "job gpt-7b finishes"'
_FORMS = (
    ("fails", re.compile(r"(?:the )?node (?P<node>\S+) (?:fails|is lost|dies|goes down)", re.I)),
    ("loses", re.compile(r"(?:the )?job (?P<job>.+) loses (?:a|one|1) (?:node|worker)", re.I)),
    ("spare", re.compile(r"(?:a|one|the) spare(?: node)? (?:fails|is lost|dies|goes down)", re.I)),
    ("joins", re.compile(r"(?:(?:a|one|the) )?node(?: \S+)? (?:joins|comes back|is repaired|returns)", re.I)),
    ("finishes", re.compile(r"(?:the )?job (?P<job>.+) (?:finishes|ends|is done|completes|is cancelled)", re.I)),
)


def suppose(scenario: Scenario, text: str) -> Scenario:
    """The scenario after one supposition. Raises PlanError if it can't be understood or can't happen."""
    words = " ".join(text.split()).rstrip(".")
    for form, pattern in _FORMS:
        match = pattern.fullmatch(words)
        if match:
            return _apply(scenario, form, match.groupdict())
    raise PlanError(f"can't understand the supposition {text!r}: say for example {EXAMPLES}")


def suppose_all(scenario: Scenario, texts: list[str] | tuple[str, ...]) -> Scenario:
    """Several suppositions, one after the other."""
    for text in texts:
        scenario = suppose(scenario, text)
    return scenario


def _apply(scenario: Scenario, form: str, found: dict[str, str]) -> Scenario:
    if form == "fails":
        return _node_fails(scenario, found["node"])
    if form == "loses":
        return after(scenario, ("lost", scenario.job(found["job"]).name))
    if form == "spare":
        _need_spare(scenario, "no spare node is left that could fail")
        return after(scenario, ("spare",))
    if form == "joins":
        return after(scenario, ("join",))
    return after(scenario, ("finish", scenario.job(found["job"]).name))


def _node_fails(scenario: Scenario, node: str) -> Scenario:
    owner: Job | None = next((job for job in scenario.jobs if node in job.node_names), None)
    if owner is None:
        known = sorted(name for job in scenario.jobs for name in job.node_names)
        shown = f"{', '.join(known[:8])}{', ...' if len(known) > 8 else ''}" if known else "not given in the scenario"
        _need_spare(scenario, f"no job runs on node {node}, and there is no spare (the jobs' nodes: {shown})")
        return after(scenario, ("spare",))
    left = tuple(name for name in owner.node_names if name != node)
    return after(scenario.with_job(replace(owner, node_names=left)), ("lost", owner.name))


def _need_spare(scenario: Scenario, otherwise: str) -> None:
    used = sum(len(job.node_names) if job.node_names else job.nodes for job in scenario.jobs)
    if used >= scenario.nodes:
        raise PlanError(otherwise)
