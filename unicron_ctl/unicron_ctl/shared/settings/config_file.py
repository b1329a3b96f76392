"""Finds and reads `unicron.toml`, and reports all its problems at once."""

from __future__ import annotations

import difflib
import os
import tomllib
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar, cast, get_args, get_origin

import msgspec

from unicron_ctl.shared.settings.config import (
    OTHER_TABLES,
    AgentConfig,
    Config,
    ControllerConfig,
    PlannerConfig,
    all_problems,
    fields_of,
    loopback_problems,
)
from unicron_ctl.shared.settings.notify import NoticeKind, NotifyConfig, notify_problems
from unicron_ctl.shared.settings.partitions import DEFAULT, PERMISSIONS, Mode, PartitionConfig
from unicron_ctl.shared.settings.power_off import power_off_unfit
from unicron_ctl.shared.system.errors import WRONG_USE, UserError
from unicron_detector.failures.classify import default_classifier
from unicron_detector.failures.severity import SeverityTableError
from unicron_detector.health.checks import HealthConfig

NOTIFY = "[notify] "  # the start of a problem of this section
SECTIONS = ("controller", "agent", "planner", "partition", "health", "notify", "severity")


def search_path(environment: Mapping[str, str] = os.environ) -> list[Path]:
    """Return the default paths of the file, of which the first existing one counts."""
    named = environment.get("UNICRON_CONFIG")
    home = Path(environment.get("XDG_CONFIG_HOME") or Path(environment.get("HOME", "/")) / ".config")
    return ([Path(named)] if named else []) + [home / "unicron" / "unicron.toml", Path("/etc/unicron/unicron.toml")]


def load(path: str | Path | None = None, environment: Mapping[str, str] = os.environ) -> Config:
    """Return the checked configuration from `path`, the search path, or all defaults. Raises UserError, one line.

    Problems of [notify] do not count, because only unicrond reads it."""
    config, problems = _read(path, environment)
    refuse(config.path, without_notify(problems) or without_notify(all_problems(config)))
    return config


def load_valid_part(
    path: str | Path | None = None, environment: Mapping[str, str] = os.environ
) -> tuple[Config, list[str]]:
    """Return the valid part of the file, and its problems in one line each. For a node's health checks: a mistake in
    one line must not switch off the others. Raises UserError for a file that cannot be read at all."""
    config, problems = _read(path, environment)
    return config, problems + all_problems(config)


def examine(
    path: str | Path | None = None, environment: Mapping[str, str] = os.environ, listen: str | None = None
) -> tuple[Config, list[str]]:
    """Return the valid part of the file, and all its problems in one line each, including those of unicrond's own
    parts. listen: replaces the file's. Raises UserError for a file that cannot be read at all."""
    config, problems = _read(path, environment)
    config.controller.listen = listen or config.controller.listen
    ours = loopback_problems(config.controller) + notify_problems(config.notify)
    unfit = [f"[controller] {why}" for why in [power_off_unfit(config.controller.power_off)] if why]
    return config, problems + all_problems(config, environment) + unfit + ours


def without_notify(problems: Sequence[str]) -> list[str]:
    """Return the problems without those of [notify], which only disable its targets."""
    return [line for line in problems if not line.startswith(NOTIFY)]


def refuse(path: str, problems: Sequence[str]) -> None:
    """Raise UserError with the first of the problems, if there is one, as wrong use, after which systemd does not
    restart the program. A file that cannot be read is no wrong use, because it may not be mounted yet."""
    if problems:
        more = f" (and {len(problems) - 1} more: `unicrond --check` prints all)" if len(problems) > 1 else ""
        raise UserError(f"{path or 'configuration'}: {problems[0]}{more}", WRONG_USE)


def parse(raw: Mapping[str, Any], path: str = "") -> Config:
    """Return the checked configuration in a mapping that was read from TOML. Raises UserError."""
    config, problems = parse_sections(raw, path)
    refuse(path, problems or all_problems(config))
    return config


def _read(path: str | Path | None, environment: Mapping[str, str]) -> tuple[Config, list[str]]:
    if path is None:
        named = environment.get("UNICRON_CONFIG")
        if named and not Path(named).is_file():
            advice = "write it, mount it if this is a container, or unset the variable"
            raise UserError(f"UNICRON_CONFIG={named}: no such file; {advice}")  # not wrong use: it may come
        path = next((candidate for candidate in search_path(environment) if candidate.is_file()), None)
        if path is None:
            return Config(), []
    try:
        with open(path, "rb") as file:
            raw = tomllib.load(file)
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}; name an existing file with --config") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: not TOML: {error}", WRONG_USE) from None
    return parse_sections(raw, str(path))


def parse_sections(raw: Mapping[str, Any], path: str = "") -> tuple[Config, list[str]]:
    """Return the configuration in a mapping that was read from TOML, with defaults for invalid parts, and these parts'
    problems."""
    problems = [_unknown(section) for section in raw if section not in SECTIONS]
    controller = _section(ControllerConfig, "controller", raw, problems)
    controller.partitions = _partitions(raw.get("partition", {}), problems)
    controller.planner = _section(PlannerConfig, "planner", raw, problems)
    agent = _section(AgentConfig, "agent", raw, problems)
    health = _section(HealthConfig, "health", raw, problems)
    notify = _section(NotifyConfig, "notify", raw, problems)
    severity = _severity(raw.get("severity", {}), problems)
    config = Config(controller=controller, agent=agent, health=health, notify=notify, severity=severity, path=path)
    return config, problems


def _unknown(section: str) -> str:
    near = difflib.get_close_matches(section, SECTIONS, 1)
    sections = ", ".join(f"[{one}]" for one in SECTIONS)
    return f"unknown section [{section}]" + (f"; did you mean [{near[0]}]?" if near else f": use one of {sections}")


def _severity(table: object, problems: list[str]) -> dict[str, Any]:
    """Return the admin's own rules, if they can be used."""
    try:
        if table != {}:  # the shipped table alone is sound
            default_classifier().load({"severity": table})
    except SeverityTableError as error:
        why = str(error).removeprefix("severity table: ")
        problems.append(why if why.startswith("[severity]") else f"[severity] {why}")
        return {}
    return dict(cast(Mapping[str, Any], table))


Section = TypeVar("Section", ControllerConfig, AgentConfig, PlannerConfig, PartitionConfig, HealthConfig, NotifyConfig)


def _section(kind: type[Section], name: str, raw: Mapping[str, Any], problems: list[str]) -> Section:
    table = raw.get(name, {})
    if not isinstance(table, Mapping):
        problems.append(f"[{name}] must be a section")
        return kind()
    return _table(kind, name, table, problems)


def _partitions(raw: object, problems: list[str]) -> dict[str, PartitionConfig]:
    if not isinstance(raw, Mapping):
        problems.append("[partition] must hold tables: write [partition.NAME]")
        return {}
    tables = {}
    for name, table in raw.items():
        if isinstance(table, Mapping):
            tables[name] = _table(PartitionConfig, f"partition.{name}", table, problems)
        else:
            meant = DEFAULT if name in PartitionConfig.__struct_fields__ else name
            problems.append(f"[partition] {name} is no table: write [partition.{meant}]")
    return tables


def _table(kind: type[Section], title: str, table: Mapping[str, Any], problems: list[str]) -> Section:
    """Make the struct of one table. Each field is converted by itself, so that every error is found."""
    types = {field.name: field.type for field in fields_of(kind) if field.name not in OTHER_TABLES}
    values: dict[str, Any] = {}
    for key, value in table.items():
        if key not in types:
            near = difflib.get_close_matches(key, types, 1)
            hint = (
                f"; did you mean {near[0]}?" if near else f": use one of {', '.join(types)}" if len(types) < 9 else ""
            )
            problems.append(f"[{title}] {key}: unknown key{hint}")
            continue
        try:
            # A wrong word for a Literal is reported by `problems`, with the others of its section.
            values[key] = msgspec.convert(value, str if get_origin(types[key]) is Literal else types[key])
        except msgspec.ValidationError as error:
            problems.append(f"[{title}] {key}: {_reason(key, value, error)}")
    return kind(**values)


CHOICES: dict[str, Collection[str]] = {"mode": get_args(Mode), "actions": PERMISSIONS, "kinds": get_args(NoticeKind)}


def _reason(key: str, value: object, error: msgspec.ValidationError) -> str:
    """Return the problem of a value, with the choices if there are any."""
    if key not in CHOICES:
        return str(error).replace(" | null", "")
    given = value if isinstance(value, list) else [value]
    odd = next((one for one in given if one not in CHOICES[key]), value)
    return f"{odd!r}: use {'one' if key == 'mode' else 'some'} of {', '.join(CHOICES[key])}"
