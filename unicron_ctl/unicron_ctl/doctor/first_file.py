"""Writes the first unicron.toml: Slurm's facts, mode observe, and every other setting as a comment. Pure."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from unicron_ctl.shared.settings.config import (
    DEFAULT_PORT,
    OTHER_TABLES,
    AgentConfig,
    ControllerConfig,
    PlannerConfig,
    fields_of,
)
from unicron_ctl.shared.settings.limits import number
from unicron_ctl.shared.settings.meanings import meanings
from unicron_ctl.shared.settings.notify import NotifyConfig
from unicron_ctl.shared.settings.partitions import DEFAULT, OBSERVE, OFF, PERMISSIONS, PartitionConfig
from unicron_detector.health.checks import HealthConfig

WIDTH = 110
STATE_DIR = "/var/lib/unicron"
# The values in the comments of settings that have no default.
EXAMPLES: dict[str, object] = {
    "gpus": 8,
    "memory_mb": 500_000,
    "actions": list(PERMISSIONS),
    "max_weight": 1.0,
    "spare_nodes": 0,
    "mode": OBSERVE,
}
TABLES = ("account", "qos")  # fields of [partition.NAME] that are tables of their own
HEAD = """\
# Unicron's settings. All hosts have the same file: the controller's, login nodes and compute nodes.
# A line with # in front shows a default. Check the file with `unicronctl config check`, and the cluster with
# `unicronctl doctor --all`. `systemctl reload unicrond` applies a change.
"""
TAIL = """\
# Rules of your own, which come before those of the shipped table (docs/detection.md):
# [[severity.rule]]
"""


@dataclass(frozen=True)
class Wish:
    """The contents of the first file."""

    host: str
    """The controller's host, by a name that all hosts know."""
    user: str = ""
    """unicrond's user, "" for root and SlurmUser, whom all hosts trust anyway."""
    partitions: tuple[str, ...] = ()
    """Slurm's partitions."""
    marked: tuple[str, ...] = ()
    """The partitions in which Unicron begins; none for all."""
    gpus: int | None = None
    """The GPUs of each node; None if nodes differ or have none."""

    @property
    def address(self) -> str:
        """The controller's address."""
        return f"tcp://{self.host}:{DEFAULT_PORT}"


def unicron_toml(wish: Wish) -> str:
    """Return the text of the file. It depends on nothing else."""
    parts = [
        HEAD,
        _section("controller", ControllerConfig, {"address": wish.address, "state_dir": STATE_DIR}),
        _section("agent", AgentConfig, {"controller_users": [wish.user]} if wish.user else {}),
        *_partitions(wish),
        _section("planner", PlannerConfig, {}),
        "# What each node must have: it can be proven bad. Nodes of another kind need a file of their own.\n"
        + _section("health", HealthConfig, {} if wish.gpus is None else {"gpus": wish.gpus}),
        "# Who gets mails and messages: what needs an admin, which jobs were healed, which nodes they left.\n"
        + _section("notify", NotifyConfig, {}),
        TAIL,
    ]
    return "\n".join(parts)


def _partitions(wish: Wish) -> list[str]:
    """Return [partition.default], a table for each marked partition, and a comment for each other one."""
    usual = OFF if wish.marked else OBSERVE
    tables = [_section(f"partition.{DEFAULT}", PartitionConfig, {"mode": usual})]
    for name in wish.marked:
        tables.append(f"[partition.{_key(name)}]\nmode = {_toml(OBSERVE)}\n")
    others = [name for name in wish.partitions if name not in wish.marked]
    tables += [f"# [partition.{_key(name)}]\n# mode = {_toml('act')}\n" for name in others]
    return tables


def _section(title: str, kind: type[msgspec.Struct], values: Mapping[str, Any]) -> str:
    """Write one table: first the keys with these values, then all others as comments, each below its meaning."""
    texts = meanings(kind)
    fields = [field for field in fields_of(kind) if field.name not in (*OTHER_TABLES, *TABLES)]
    fields.sort(key=lambda field: field.name not in values)
    lines = [f"[{title}]"]
    for field in fields:
        lines += textwrap.wrap(texts[field.name], WIDTH, initial_indent="# ", subsequent_indent="# ")
        if field.name in values:
            lines.append(f"{field.name} = {_toml(values[field.name])}")
        else:
            lines.append(f"# {field.name} = {_toml(_default(field))}")
    return "\n".join(lines) + "\n"


def _default(field: msgspec.structs.FieldInfo) -> Any:
    value = field.default if field.default is not msgspec.NODEFAULT else field.default_factory()
    return EXAMPLES[field.name] if value is None else value


def _toml(value: Any) -> str:
    """Write a value as TOML."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        text = number(value)
        return text if "." in text else f"{text}.0"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{_key(name)} = {_toml(each)}' for name, each in value.items())}}}"
    if isinstance(value, Sequence) and not isinstance(value, str):
        return f"[{', '.join(map(_toml, value))}]"
    return json.dumps(value)


def _key(name: str) -> str:
    """Write the name of a table, in quotes if TOML wants them."""
    return name if name.isascii() and name.replace("-", "").replace("_", "").isalnum() else json.dumps(name)
