"""The rules among time-outs and limits: those of settings, and those of constants that nobody can set."""

from __future__ import annotations

import importlib
import pkgutil
import re
import subprocess
import sys

import msgspec
import pytest

from tests.support.processes import LIMIT, ROOT
from unicron_ctl.shared.settings import limits
from unicron_ctl.shared.settings.config import OTHER_TABLES, AgentConfig, ControllerConfig, rule_values
from unicron_ctl.shared.settings.limits import (
    CONSTANT_RULES,
    FIXED_LIMITS,
    OWNERS,
    RULES,
    SLURM_DEFAULTS,
    VARIABLES,
    Range,
    contradictions,
    fixed_values,
    names,
    number,
    rule_lines,
)


def value_of(name: str) -> float:
    """Return the one value of "owner.CONSTANT" of a rule."""
    owner, _, constant = name.partition(".")
    if name in SLURM_DEFAULTS:
        return SLURM_DEFAULTS[name]
    if "/" in OWNERS[owner]:  # a shell script or a systemd unit
        found = re.findall(rf"^{constant}=([\d.]+)$", (ROOT / OWNERS[owner]).read_text(), re.MULTILINE)
    else:
        package = importlib.import_module(OWNERS[owner])
        modules = [one.name for one in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")]
        modules = [name for name in modules if ".torchtitan" not in name]  # that one needs torchtitan
        found = [vars(module)[constant] for module in map(importlib.import_module, modules) if constant in vars(module)]
    assert len(set(found)) == 1, f"{name}: {OWNERS[owner]} has {set(found) or 'no such constant'}"
    return float(found[0])


@pytest.mark.parametrize("rule", CONSTANT_RULES, ids=lambda rule: f"{rule.low} and {rule.high}")
def test_the_constants_keep_their_rules(rule: limits.Rule) -> None:
    values = {name: value_of(name) for side in (rule.low, rule.high) for name in names(side)}
    assert contradictions(values, rules=[rule]) == []
    assert contradictions(dict.fromkeys(values, 1.0), rules=[rule]), "equal values are refused"


def test_a_quiet_controller_is_not_an_absent_one() -> None:
    assert limits.HEARTBEATS.high < limits.ORPHAN_SECONDS


def test_every_name_in_a_rule_is_known() -> None:
    known = {*FIXED_LIMITS, *VARIABLES, "lease", *ControllerConfig.__struct_fields__}
    assert {name for rule in RULES for side in rule[:2] for name in names(side)} <= known


def test_the_defaults_keep_every_rule() -> None:
    values, found = rule_values(ControllerConfig(), {})
    assert found == [] and contradictions(values) == []
    assert len(rule_lines(values)) == len(RULES) and len(rule_lines(values, slurm=False)) < len(RULES)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: f"{rule.low} and {rule.high}")
def test_each_rule_is_noticed_when_it_alone_is_broken(rule: limits.Rule) -> None:
    values = {name: 1.0 for name in (*names(rule.low), *names(rule.high))}
    values[names(rule.low)[0]] = 1000.0
    (problem,) = (line for line in contradictions(values) if rule.why in line)
    assert problem.endswith(rule.why) and "\n" not in problem
    values[names(rule.low)[0]], values[names(rule.high)[0]] = 1.0, 1000.0
    assert not [line for line in contradictions(values) if rule.why in line]


def test_an_equal_value_is_enough_only_where_the_rule_says_so(snapshot) -> None:
    assert contradictions({"restart_seconds": 600.0, "UNICRON_PLAN_TIMEOUT": 600.0}) == []
    assert contradictions({"repeat_seconds": 10.0, "report_timeout": 10.0}) == snapshot


def test_a_message_begins_with_what_can_be_changed(snapshot) -> None:
    outside = contradictions({"hang_outside_seconds": 3600.0, "UNICRON_COLLECTIVE_TIMEOUT": 1800.0})
    assert [*outside, *contradictions({"PLANNED_SECONDS": 8.0, "report_timeout": 5.0})] == snapshot


def test_variables_of_the_environment() -> None:
    assert fixed_values({"UNICRON_PLAN_TIMEOUT": "1.5"})[0]["UNICRON_PLAN_TIMEOUT"] == 1.5
    for text in ("soon", "inf", "nan", "-1"):
        values, (problem,) = fixed_values({"UNICRON_PLAN_TIMEOUT": text})
        assert "UNICRON_PLAN_TIMEOUT" not in values and problem.startswith(f"UNICRON_PLAN_TIMEOUT = '{text}'")


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
