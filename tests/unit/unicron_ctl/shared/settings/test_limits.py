"""The rules among time-outs and limits: those of settings, and those of constants that nobody can set."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache

import msgspec
import pytest

from tests.support.processes import LIMIT, ROOT
from unicron_ctl.shared.settings import limits
from unicron_ctl.shared.settings.config import OTHER_TABLES, AgentConfig, ControllerConfig, rule_values
from unicron_ctl.shared.settings.limits import (
    FIXED,
    RULES,
    VARIABLES,
    Range,
    contradictions,
    fixed_values,
    names,
    number,
    rule_lines,
)

# Whose constants they are, and the folder or file that has them.
HOMES = {
    "controller": "unicron_ctl/unicron_ctl/controller",
    "log": "unicron_ctl/unicron_ctl/shared/log",
    "agent": "unicron_ctl/unicron_ctl/agent",
    "register": "unicron_ctl/unicron_ctl/agent/start/agent_main.py",
    "rank": "transition",
    "node": "unicron_ctl/unicron_ctl/nodes",
    "consensus": "unicron_ctl/unicron_ctl/shared/consensus",
    "settings": "unicron_ctl/unicron_ctl/shared/settings/limits.py",
    "protocol": "unicron_ctl/unicron_ctl/shared/protocol",
    "process": "unicron_ctl/unicron_ctl/shared/system/descriptors.py",
    "prolog": "slurm_plugin/prolog.d/50-unicron",
    "health": "slurm_plugin/health/unicron-health",
    "service": "slurm_plugin/systemd/unicrond.service",
}
SLURM = {"KillWait": 30.0, "BatchStartTimeout": 10.0, "HealthCheckProgram": 60.0}  # slurm.conf(5): the defaults
# The first, a sum of constants, must be below the second.
FIXED_RULES = (
    ("agent.SILENT_SECONDS + agent.AGAIN_SECONDS", "controller.FETCH_SECONDS", "what failed is tried again"),
    ("controller.FETCH_SECONDS", "agent.FAILING_SECONDS", "while a job waits, the agent that failed is asked last"),
    ("controller.CUT_SECONDS", "controller.CUT_LIMIT_SECONDS", "copies take their time"),
    ("agent.TOUCH_SECONDS", "agent.FORGOTTEN_SECONDS", "what is in use must not look forgotten"),
    ("agent.REACH_SECONDS", "controller.ANSWER_SECONDS", "a witness has tried by then"),
    ("agent.REACH_SECONDS", "controller.SURVEY_SECONDS", "all have tried by then"),
    ("controller.ANSWER_SECONDS", "controller.ROUND_SECONDS", "answers come within their round"),
    ("agent.REGISTER_SECONDS", "register.REGISTER_TIMEOUT", "a lost registration is repeated"),
    ("controller.CONFIRM_SECONDS", "register.REGISTER_TIMEOUT", "a Slurm that hangs must not cost protection"),
    ("protocol.TIME_LIMIT + protocol.TIME_LIMIT", "register.REGISTER_TIMEOUT", "munge may be slow on both sides"),
    ("protocol.LEAST_PROGRESS", "controller.PROGRESS_SECONDS", "agents refuse anything else"),
    ("agent.ENDING_SECONDS", "slurm.KillWait", "the agent has to report the end before Slurm kills it"),
    ("agent.OWN_END_SECONDS + agent.STOP_SECONDS", "settings.PLANNED_SECONDS", "a loss is answered faster than a plan"),
    ("agent.ANSWER_SECONDS", "agent.HUNG_SECONDS", "a slow fork is not a dead template"),
    ("consensus.TELL_SECONDS", "consensus.AWAY_SECONDS", "all ask the controller before they agree"),
    ("controller.STALL_SECONDS", "consensus.AWAY_SECONDS", "a controller knows that it was away"),
    ("consensus.RESEND_SECONDS", "consensus.BALLOT_SECONDS", "a lost message is repeated first"),
    ("consensus.REST_SECONDS", "rank.PLAN_TIMEOUT", "stopped ranks wait for those that stop late"),
    ("rank.CONNECT_SECONDS", "rank.ENTER_TIMEOUT", "several tries"),
    ("rank.ENTER_TIMEOUT", "rank.COLLECTIVE_TIMEOUT", "quick to give up while connecting, patient in training"),
    ("rank.COLLECTIVE_TIMEOUT", "rank.BOUNDARY_TIMEOUT", "a newcomer waits for a whole iteration"),
    ("node.REPORT_SECONDS", "node.BUDGET_SECONDS", "the report is part of the checks' time"),
    ("prolog.UNICRON_HEALTH_SECONDS", "slurm.BatchStartTimeout", "a batch job starts after its prolog"),
    ("health.UNICRON_HEALTH_SECONDS", "slurm.HealthCheckProgram", "slurmd kills it then"),
    ("log.BUSY_SECONDS", "service.WatchdogSec", "a locked event log is not a stalled loop"),
    (
        "log.LOST_SECONDS + log.LEASE_SECONDS + log.RENEW_SECONDS",
        "agent.OUTLIVED_SECONDS",
        "who still speaks then was not taken over",
    ),
    ("process.CONNECTIONS", "service.LimitNOFILE", "each connection is an open file"),
)


def constants(home: str) -> Iterator[tuple[str, float]]:
    """The numbers that the modules there define for themselves; those of a tuple one by one."""
    path = ROOT / home
    for module in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
        for line in ast.parse(module.read_text()).body:
            target = line.targets[0] if isinstance(line, ast.Assign) else getattr(line, "target", None)
            value = getattr(line, "value", None)
            if isinstance(target, ast.Name) and isinstance(value, ast.Tuple):
                pairs = [(f"{target.id}[{index}]", item) for index, item in enumerate(value.elts)]
            elif isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
                pairs = [
                    (one.id, item)
                    for one, item in zip(target.elts, value.elts, strict=False)
                    if isinstance(one, ast.Name)
                ]
            elif isinstance(target, ast.Name) and value is not None:
                pairs = [(target.id, value)]
            else:
                continue
            for name, node in pairs:
                try:
                    yield name, float(eval(compile(ast.Expression(node), home, "eval"), {"__builtins__": {}}))
                except (NameError, SyntaxError, TypeError, ValueError):
                    continue  # no number, or made of others


@cache
def constants_of(home: str) -> dict[str, set[float]]:
    """The constants there by name, with all values that they have."""
    found: dict[str, set[float]] = {}
    for name, value in constants(home):
        found.setdefault(name, set()).add(value)
    return found


def in_a_file(home: str, name: str) -> float | None:
    """A constant of C, of a shell script or of a systemd unit."""
    found = re.search(rf"^(?:#define )?{name}[ =]([\d.]+)L?$", (ROOT / home).read_text(), re.MULTILINE)
    return float(found[1]) if found else None


def value_of(name: str) -> float:
    """The one value of "owner.CONSTANT" in the sources."""
    owner, _, constant = name.partition(".")
    if owner == "slurm":
        return SLURM[constant]
    home = HOMES[owner]
    if home.startswith("slurm_plugin"):
        found = in_a_file(home, constant)
        assert found is not None, f"{home} has no {constant}"
        return found
    values = constants_of(home).get(constant, set())
    assert len(values) == 1, f"{name}: {home} has {values or 'no such constant'}"
    return next(iter(values))


@pytest.mark.parametrize(("low", "high", "why"), FIXED_RULES, ids=lambda text: text if "." in text else "")
def test_the_constants_keep_their_rules(low: str, high: str, why: str) -> None:
    assert sum(map(value_of, names(low))) < value_of(high), why


def test_a_quiet_controller_is_not_an_absent_one() -> None:
    assert limits.HEARTBEATS.high < limits.ORPHAN_SECONDS


def test_every_name_in_a_rule_is_known() -> None:
    known = {*FIXED, *VARIABLES, "lease", *ControllerConfig.__struct_fields__}
    assert {name for rule in RULES for side in rule[:2] for name in names(side)} <= known


def test_the_defaults_keep_every_rule() -> None:
    values, found = rule_values(ControllerConfig(), {})
    assert found == [] and contradictions(values) == []
    assert len(rule_lines(values)) == len(RULES) and len(rule_lines(values, slurm=False)) < len(RULES)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: f"{rule.low} and {rule.high}")
def test_each_rule_is_noticed_when_it_alone_is_broken(rule: limits.Rule) -> None:
    values = {name: 1.0 for name in (*names(rule.low), *names(rule.high))}
    values[names(rule.low)[0]] = 1000.0
    (said,) = (line for line in contradictions(values) if rule.why in line)
    assert said.endswith(rule.why) and "\n" not in said
    values[names(rule.low)[0]], values[names(rule.high)[0]] = 1.0, 1000.0
    assert not [line for line in contradictions(values) if rule.why in line]


def test_an_equal_value_is_enough_only_where_the_rule_says_so() -> None:
    assert contradictions({"restart_seconds": 600.0, "UNICRON_PLAN_TIMEOUT": 600.0}) == []
    (said,) = contradictions({"repeat_seconds": 10.0, "report_timeout": 10.0})
    assert said.startswith("report_timeout = 10 must be above repeat_seconds = 10: ")


def test_a_message_begins_with_what_can_be_changed() -> None:
    (said,) = contradictions({"hang_outside_seconds": 3600.0, "UNICRON_COLLECTIVE_TIMEOUT": 1800.0})
    assert said.startswith("hang_outside_seconds = 3600 must be below UNICRON_COLLECTIVE_TIMEOUT = 1800: ")
    (said,) = contradictions({"PLANNED_SECONDS": 8.0, "report_timeout": 5.0})
    assert said.startswith("report_timeout = 5 must be above PLANNED_SECONDS = 8: ")


def test_variables_of_the_environment() -> None:
    assert fixed_values({"UNICRON_PLAN_TIMEOUT": "1.5"})[0]["UNICRON_PLAN_TIMEOUT"] == 1.5
    for text in ("soon", "inf", "nan", "-1"):
        values, (said,) = fixed_values({"UNICRON_PLAN_TIMEOUT": text})
        assert "UNICRON_PLAN_TIMEOUT" not in values and said.startswith(f"UNICRON_PLAN_TIMEOUT = '{text}'")


def test_ranges() -> None:
    assert Range(1.0, 2.0).problem("a", 2.0) == "" and Range(1.0, 2.0, zero=True).problem("a", 0.0) == ""
    assert Range(1.0, 2.0, why="so").problem("a", 0.0) == "a = 0 must be 1 to 2: so"


def test_numbers_are_written_as_people_write_them() -> None:
    assert [number(value) for value in (2592000.0, 0.1 + 0.2, 5, 1e9)] == ["2592000", "0.3", "5", "1000000000"]


def test_the_reference_has_every_field_limit_and_rule() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "tools" / "reference_tables.py"), "--check"],
        cwd=ROOT,
        env={"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    reference = (ROOT / "docs" / "reference.md").read_text()
    for field in (*msgspec.structs.fields(ControllerConfig), *msgspec.structs.fields(AgentConfig)):
        if field.name in OTHER_TABLES:
            continue
        assert f"{field.name}` |" in reference, field.name
