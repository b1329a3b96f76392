"""All time-outs and limits: that the list is true and complete, and that the defaults keep the rules."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from unicron.ctl.settings import limits
from unicron.ctl.settings.config import ELSEWHERE, AgentConfig, ControllerConfig, rungs
from unicron.ctl.settings.limits import (
    HEARTBEATS,
    HOMES,
    LIMITS,
    RULES,
    Range,
    contradictions,
    fixed,
    ladder,
    names,
    number,
)

ROOT = Path(__file__).resolve().parents[3]
# Names of constants that are times; a new one has to be listed.
TIMES = re.compile(r"(^|_)(SECONDS|TIMEOUT|PERIODS|TIME_LIMIT)(\[\d\])?$")
SWEPT = ("controller", "agent", "agreement", "rank", "detector", "node", "protocol")


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


def in_a_file(home: str, name: str) -> float | None:
    """A constant of C, of a shell script or of a systemd unit."""
    found = re.search(rf"^(?:#define )?{name}[ =]([\d.]+)L?$", (ROOT / home).read_text(), re.MULTILINE)
    return float(found[1]) if found else None


@pytest.mark.parametrize("owner", [owner for owner in HOMES if owner != "slurm"])
def test_the_listed_values_are_those_of_the_sources(owner: str) -> None:
    home = HOMES[owner]
    values: dict[str, set[float | None]] = {}
    for name, value in constants(home) if not home.startswith("slurm_plugin") else ():
        values.setdefault(name, set()).add(value)
    for limit in LIMITS:
        if limit.owner == owner:
            known = values.get(limit.name) or {in_a_file(home, limit.name) if not values else None}
            assert known == {limit.value}, f"{limit.key} is {known} in {home}: mend unicron_ctl/settings/limits.py"


@pytest.mark.parametrize("owner", SWEPT)
def test_every_time_of_the_sources_is_listed(owner: str) -> None:
    listed = {limit.name for limit in LIMITS if limit.owner == owner}
    missing = {name for name, _ in constants(HOMES[owner]) if TIMES.search(name)} - listed
    assert not missing, f"list {sorted(missing)} of {HOMES[owner]} in unicron_ctl/settings/limits.py"


def test_keys_are_unique_and_every_name_in_a_rule_is_known() -> None:
    keys = [limit.key for limit in LIMITS]
    assert len(keys) == len(set(keys)) and {limit.owner for limit in LIMITS} == set(HOMES)
    known = {*keys, "lease", *ControllerConfig.__struct_fields__}
    assert {name for rule in RULES for side in rule[:2] for name in names(side)} <= known


def test_the_defaults_keep_every_rule() -> None:
    values, found = rungs(ControllerConfig(), {})
    assert found == [] and contradictions(values) == []
    assert len(ladder(values)) == len(RULES) and len(ladder(values, slurm=False)) < len(RULES)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: f"{rule.low} and {rule.high}")
def test_each_rule_is_noticed_when_it_alone_is_broken(rule: limits.Rule) -> None:
    values = {name: 1.0 for name in (*names(rule.low), *names(rule.high))}
    values[names(rule.low)[0]] = 1000.0
    (said,) = (line for line in contradictions(values) if rule.why in line)
    assert said.endswith(rule.why) and "\n" not in said
    values[names(rule.low)[0]], values[names(rule.high)[0]] = 1.0, 1000.0
    assert not [line for line in contradictions(values) if rule.why in line]


def test_an_equal_value_is_enough_only_where_the_rule_says_so() -> None:
    assert contradictions({"restart_seconds": 600.0, "rank.PLAN_TIMEOUT": 600.0}) == []
    (said,) = contradictions({"repeat_seconds": 10.0, "report_timeout": 10.0})
    assert said.startswith("report_timeout = 10 must be above repeat_seconds = 10: ")


def test_a_message_begins_with_what_can_be_changed() -> None:
    (said,) = contradictions({"hang_outside_seconds": 3600.0, "rank.COLLECTIVE_TIMEOUT": 1800.0})
    assert said.startswith("hang_outside_seconds = 3600 must be below UNICRON_COLLECTIVE_TIMEOUT = 1800: ")
    (said,) = contradictions({"agent.PLANNED_SECONDS": 8.0, "report_timeout": 5.0})
    assert said.startswith("report_timeout = 5 must be above agent.PLANNED_SECONDS = 8: ")


def test_variables_of_the_environment() -> None:
    assert fixed({"UNICRON_PLAN_TIMEOUT": "1.5"})[0]["rank.PLAN_TIMEOUT"] == 1.5
    for text in ("soon", "inf", "nan", "-1"):
        values, (said,) = fixed({"UNICRON_PLAN_TIMEOUT": text})
        assert "rank.PLAN_TIMEOUT" not in values and said.startswith(f"UNICRON_PLAN_TIMEOUT = '{text}'")


def test_heartbeats_are_those_that_agents_accept() -> None:
    values, _ = fixed({})
    assert HEARTBEATS[:2] == (values["protocol.LEAST_BEAT"], values["protocol.MOST_BEAT"])


def test_ranges() -> None:
    assert Range(1.0, 2.0).problem("a", 2.0) == "" and Range(1.0, 2.0, zero=True).problem("a", 0.0) == ""
    assert Range(1.0, 2.0, why="so").problem("a", 0.0) == "a = 0 must be 1 to 2: so"


def test_numbers_are_written_as_people_write_them() -> None:
    assert [number(value) for value in (2592000.0, 0.1 + 0.2, 5, 1e9)] == ["2592000", "0.3", "5", "1000000000"]


def test_the_reference_has_every_field_limit_and_rule() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "tools" / "limits_tables.py"), "--check"],
        cwd=ROOT,
        env={"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=20,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    reference = (ROOT / "docs" / "reference.md").read_text()
    for field in (*msgspec.structs.fields(ControllerConfig), *msgspec.structs.fields(AgentConfig)):
        if field.name in ELSEWHERE:
            continue
        assert f"{field.name}` |" in reference, field.name
