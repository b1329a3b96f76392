"""`[partition.NAME]` of unicron.toml: what an admin lets the controller do to the jobs and nodes of a Slurm partition.

Two permissions are separate. A job's owner may have it healed within the nodes that it has, in every mode but "off".
What touches Slurm takes the admin's permission: in "observe" it is only decided and recorded.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Literal, get_args

import msgspec

OFF, OBSERVE, ACT = "off", "observe", "act"
DEFAULT = "default"  # the table for all partitions that have none of their own
Mode = Literal["off", "observe", "act"]
Permission = Literal["drain", "down", "requeue", "hold", "pin", "move", "cancel", "comment"]
PERMISSIONS: tuple[str, ...] = get_args(Permission)
# Calls of a SlurmClient and what allows them, any of it. Whoever may take a node may give it back, and so for holds.
PERMISSION_OF: dict[str, tuple[str, ...]] = {
    "drain": ("drain",),
    "down": ("down",),
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
    """What may be done in "act"; by default everything."""
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
        """Gives the rules while that is so."""
        return replace(self, mode=OBSERVE, is_paused=True) if self.mode == ACT else self

    def may(self, call: str) -> bool:
        """Whether this call of a SlurmClient is allowed."""
        return self.mode == ACT and not self.actions.isdisjoint(PERMISSION_OF[call])

    def refusal(self, call: str) -> str:
        """Why it is not, and what would change that; empty when it is."""
        if self.may(call):
            return ""
        if self.is_paused:
            return f"partition {self.partition} is paused, until `unicronctl resume`"
        if self.mode != ACT:
            return f'partition {self.partition} is in mode "{self.mode}"'
        return f"the actions of partition {self.partition} do not include {' or '.join(PERMISSION_OF[call])}"

    def most_weight(self, account: str, qos: str) -> float:
        """The most that a job of this account and QOS may claim."""
        claims = [known[name] for known, name in ((self.accounts, account), (self.qos, qos)) if name in known]
        return max(claims, default=self.max_weight)


def rules(partitions: Mapping[str, PartitionConfig], name: str) -> Rules:
    """The rules of the partition `name` ("" for one that is not known)."""
    usual, own = partitions.get(DEFAULT, PartitionConfig()), partitions.get(name, PartitionConfig())
    mode = own.mode or usual.mode or OBSERVE
    actions = next((found for found in (own.actions, usual.actions) if found is not None), PERMISSIONS)
    weight = next((found for found in (own.max_weight, usual.max_weight) if found is not None), 1.0)
    spare = next((found for found in (own.spare_nodes, usual.spare_nodes) if found is not None), 0)
    accounts = {**usual.account, **own.account}
    qos = {**usual.qos, **own.qos}
    return Rules(
        name or DEFAULT,
        mode,
        frozenset(actions),
        weight,
        spare,
        {known: claim.max_weight for known, claim in accounts.items()},
        {known: claim.max_weight for known, claim in qos.items()},
    )


def strictest(found: Iterable[Rules]) -> Rules:
    """The rules of a job that may be in any of several partitions: what all of them allow. `found` must not be
    empty."""
    listed = list(found)
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
