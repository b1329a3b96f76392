"""Defines `[partition.NAME]` of unicron.toml: an admin's rules for the jobs and nodes of a Slurm partition.

A job is healed within its own nodes in every mode but "off". Changes in Slurm need the admin's permission: in "observe"
they are only decided and recorded.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal, get_args

import msgspec

OFF, OBSERVE, ACT = "off", "observe", "act"
DEFAULT = "default"  # the table for all partitions without one
Mode = Literal["off", "observe", "act"]
Permission = Literal["drain", "down", "power_off", "requeue", "hold", "pin", "move", "cancel", "comment"]
PERMISSIONS: tuple[str, ...] = get_args(Permission)
# Calls of a SlurmClient, and the permissions of which each needs one. Taking a node includes giving it back, and a hold
# includes its release.
PERMISSION_OF: dict[str, tuple[str, ...]] = {
    "drain": ("drain",),
    "down": ("down",),
    "power_off": ("power_off",),
    "resume": ("drain", "down"),
    "requeue": ("requeue",),
    "requeue_hold": ("move",),
    "shrink": ("move",),
    "hold": ("hold",),
    "release": ("hold",),
    "pin": ("pin",),
    "start_now": ("pin", "requeue"),
    "cancel": ("cancel",),
    "comment": ("comment",),
}
_STRICTEST = (OFF, OBSERVE, ACT)

Weight = Annotated[float, msgspec.Meta(ge=0.0, le=1e6)]


class Claim(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """[partition.NAME.account.ACCOUNT] and [partition.NAME.qos.QOS]."""

    max_weight: Weight


class PartitionConfig(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The section [partition.NAME]. A field that it leaves out is as in [partition.default]."""

    mode: Mode | None = None
    """off: its jobs run unprotected. observe: they heal on their own nodes, and nothing
    changes in Slurm. act: all."""
    actions: list[Permission] | None = None
    """The actions that are allowed in "act"; by default all."""
    max_weight: Weight | None = None
    """The most that a job's weight counts for; by default 1."""
    spare_nodes: Annotated[int, msgspec.Meta(ge=0, le=1_000_000)] | None = None
    """Nodes that growing jobs leave free; one may replace a lost node. By default 0."""
    account: dict[str, Claim] = {}
    """Accounts whose jobs may claim another weight."""
    qos: dict[str, Claim] = {}
    """QOS whose jobs may claim another weight; the larger of the two counts."""


@dataclass(frozen=True)
class Rules:
    """The rules of one partition."""

    partition: str
    mode: str
    actions: frozenset[str] = frozenset(PERMISSIONS)
    max_weight: float = 1.0
    spare_nodes: int = 0
    accounts: Mapping[str, float] = field(default_factory=dict)
    qos: Mapping[str, float] = field(default_factory=dict)
    is_paused: bool = False
    """An admin has nothing changed in Slurm for a while (`unicronctl pause`)."""

    def as_paused(self) -> Rules:
        """Return the rules during a pause."""
        return replace(self, mode=OBSERVE, is_paused=True) if self.mode == ACT else self

    def may(self, call: str) -> bool:
        """Whether this call of a SlurmClient is allowed."""
        return self.mode == ACT and not self.actions.isdisjoint(PERMISSION_OF[call])

    def refusal(self, call: str) -> str:
        """Return why this call is not allowed, and what would allow it; empty if it is allowed."""
        if self.may(call):
            return ""
        if self.is_paused:
            return f"partition {self.partition} is paused, until `unicronctl resume`"
        if self.mode != ACT:
            return f'partition {self.partition} is in mode "{self.mode}"'
        return f"the actions of partition {self.partition} do not include {' or '.join(PERMISSION_OF[call])}"

    def most_weight(self, account: str, qos: str) -> float:
        """Return the largest weight that a job of this account and QOS may claim."""
        claims = [weights[name] for weights, name in ((self.accounts, account), (self.qos, qos)) if name in weights]
        return max(claims, default=self.max_weight)


def rules(partitions: Mapping[str, PartitionConfig], name: str) -> Rules:
    """Return the rules of the partition `name` ("" if that is not known)."""
    usual, own = partitions.get(DEFAULT, PartitionConfig()), partitions.get(name, PartitionConfig())

    def value(field: str, default: object) -> Any:
        return next((found for one in (own, usual) if (found := getattr(one, field)) is not None), default)

    return Rules(
        name or DEFAULT,
        value("mode", OBSERVE),
        frozenset(value("actions", PERMISSIONS)),
        value("max_weight", 1.0),
        value("spare_nodes", 0),
        {account: claim.max_weight for account, claim in (usual.account | own.account).items()},
        {qos: claim.max_weight for qos, claim in (usual.qos | own.qos).items()},
    )


def strictest(several: Iterable[Rules]) -> Rules:
    """Return the rules for a job that may run in several partitions: what all of them allow. There is at least
    one."""
    listed = list(several)
    first = min(listed, key=lambda one: (_STRICTEST.index(one.mode), len(one.actions)))
    if len(listed) == 1:
        return first
    accounts = {name: min(one.most_weight(name, "") for one in listed) for one in listed for name in one.accounts}
    qos = {name: min(one.most_weight("", name) for one in listed) for one in listed for name in one.qos}
    return Rules(
        first.partition,
        first.mode,
        frozenset.intersection(*(one.actions for one in listed)),
        min(one.max_weight for one in listed),
        max(one.spare_nodes for one in listed),
        accounts,
        qos,
        first.is_paused,
    )
