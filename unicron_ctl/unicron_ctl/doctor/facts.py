"""The facts that the checks judge, of one host and of the cluster, and what a check is.

A host's facts travel as JSON (`on_nodes`). `examination.CHECKS` names who collects and who judges each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import msgspec

from unicron_ctl.shared.settings.config import Config
from unicron_ctl.shared.slurm.slurm_client import NodeInfo, PartitionInfo
from unicron_ctl.shared.slurm.slurm_settings import SlurmSettings

Role = Literal["head", "login", "compute"]
HEAD: Role = "head"
LOGIN: Role = "login"
COMPUTE: Role = "compute"
NO_LIMIT = -1  # of a resource


class Question(msgspec.Struct, kw_only=True):
    """Where a host is to look. Empty texts and lists: Slurm did not say, or it is not set.

    config: unicron.toml, "" where programs find it themselves. controller: in place of that file's address.
    plugstack: files of which the first that exists counts. plugin_dir: Slurm's PluginDir, folders with colons.
    prolog, epilog: as in slurm.conf, with wildcards. users: names whose numbers are wanted. door: a port is opened
    for so many seconds, for the controller's host to try; 0 for none.
    """

    role: Role
    config: str = ""
    controller: str = ""
    plugstack: list[str] = []
    plugin_dir: str = ""
    prolog: list[str] = []
    epilog: list[str] = []
    health_program: str = ""
    users: list[str] = []
    door: float = 0.0


class ConfigFacts(msgspec.Struct, kw_only=True):
    """A host's unicron.toml. path: "" without one. digest: of its bytes. problems: in one line each. address: several
    have commas between them. believed: uids of `controller_users` on this host; None for a name that it does not know.
    """

    path: str = ""
    digest: str = ""
    problems: list[str] = []
    address: str = ""
    auth: str = "munge"
    believed: dict[str, int | None] = {}


class ControllerFacts(msgspec.Struct, kw_only=True):
    """What the controller answered. problem: why nothing came, else "". tcp: whether its port takes connections; None
    where that was not tried. ahead: seconds by which its clock is ahead of this host's, known to +- `within`."""

    address: str = ""
    problem: str = ""
    tcp: bool | None = None
    release: str = ""
    uid: int = 0
    ahead: float = 0.0
    within: float = 0.0


class PluginFacts(msgspec.Struct, kw_only=True):
    """The plugin's line and its file. plugstack: the file that Slurm reads, "" where there is none. line: "" where none
    names unicron.so. release, slurm: what it was built as and for, "" where the file does not say. late: container
    plugins that come after it."""

    plugstack: str = ""
    line: str = ""
    path: str = ""
    is_there: bool = False
    required: bool = False
    release: str = ""
    slurm: str = ""
    controller: str = ""
    config: str = ""
    late: list[str] = []


class AgentFacts(msgspec.Struct, kw_only=True):
    """The program in the plugin's line. problem: why it cannot be executed, else ""."""

    path: str = ""
    problem: str = ""
    release: str = ""


class ScriptFacts(msgspec.Struct, kw_only=True):
    """Programs that Slurm starts on a node. found: those that the setting leads to. ours: those among them that call
    Unicron's. blocked: ours that cannot be executed."""

    found: list[str] = []
    ours: list[str] = []
    blocked: list[str] = []


class HealthFacts(msgspec.Struct, kw_only=True):
    """health.conf and prolog.conf. conf: "" without one. python: UNICRON_PYTHON, or the scripts' default. problem: why
    it cannot run the checks, else "". seconds: the admission checks' time in the prolog; 0 where it does not run
    them."""

    conf: str = ""
    python: str = ""
    problem: str = ""
    seconds: int = 0


class ShmFacts(msgspec.Struct, kw_only=True):
    """/dev/shm, in bytes. size: 0 where it is none. memory: the host's."""

    size: int = 0
    free: int = 0
    memory: int = 0


class KernelLogFacts(msgspec.Struct, kw_only=True):
    """The kernel log that agents read. watched: [agent] node_events. restricted: kernel.dmesg_restrict is 1. readable:
    whether every user may read the file."""

    watched: bool = True
    path: str = "/dev/kmsg"
    restricted: bool = False
    is_there: bool = True
    readable: bool = True


class ContainerFacts(msgspec.Struct, kw_only=True):
    """Container runtimes. enroot_missing: sources of Unicron's mounts that this host lacks. apptainer_binds: whether
    its configuration binds the agent's folder."""

    enroot: bool = False
    enroot_mounts: bool = False
    enroot_missing: list[str] = []
    apptainer: bool = False
    apptainer_binds: bool = False


class HostFacts(msgspec.Struct, kw_only=True):
    """One host. name: Slurm's name of a node, else the host's. limits: by name, :data:`NO_LIMIT` for none.
    munge: why a credential cannot be made and read here, else "". users: uids by name, None for an unknown name.
    unicrond_files: how many files the running unicrond may open; None where none runs here, or it cannot be seen."""

    name: str
    role: Role
    user: str = ""
    uid: int = 0
    release: str = ""
    python: str = ""
    torch: str = ""
    megatron: str = ""
    config: ConfigFacts = msgspec.field(default_factory=ConfigFacts)
    controller: ControllerFacts = msgspec.field(default_factory=ControllerFacts)
    munge: str = ""
    users: dict[str, int | None] = {}
    plugin: PluginFacts = msgspec.field(default_factory=PluginFacts)
    agent: AgentFacts = msgspec.field(default_factory=AgentFacts)
    prolog: ScriptFacts = msgspec.field(default_factory=ScriptFacts)
    epilog: ScriptFacts = msgspec.field(default_factory=ScriptFacts)
    health_program: ScriptFacts = msgspec.field(default_factory=ScriptFacts)
    health: HealthFacts = msgspec.field(default_factory=HealthFacts)
    shm: ShmFacts = msgspec.field(default_factory=ShmFacts)
    limits: dict[str, int] = {}
    infiniband: bool = False
    kernel_log: KernelLogFacts = msgspec.field(default_factory=KernelLogFacts)
    containers: ContainerFacts = msgspec.field(default_factory=ContainerFacts)
    unicrond_files: int | None = None


@dataclass(frozen=True)
class SiteFacts:
    """The cluster. slurm_problem: why Slurm gave no answer, else "". config: this host's unicron.toml, as far as it has
    a meaning. admin_level: that of the controller's user in slurmdbd, "" where it has none; level_problem: why it is
    not known. controller_name: the name of the controller's user on this host, "" while no controller has answered."""

    slurm_problem: str = ""
    settings: SlurmSettings = field(default_factory=SlurmSettings)
    nodes: tuple[NodeInfo, ...] = ()
    partitions: tuple[PartitionInfo, ...] = ()
    config: Config = field(default_factory=Config)
    controller_name: str = ""
    admin_level: str = ""
    level_problem: str = ""


@dataclass(frozen=True)
class Ports:
    """What the controller's host can reach on the nodes: node -> why not, "" where it can. why_not: why nothing was
    tried, else ""."""

    agents: dict[str, str] = field(default_factory=dict)
    slurmds: dict[str, str] = field(default_factory=dict)
    why_not: str = ""


Verdict = Literal["problem", "advice", "unknown", "good"]
PROBLEM: Verdict = "problem"  # Unicron does less than its documents say, or nothing
ADVICE: Verdict = "advice"  # it works; this would be better
UNKNOWN: Verdict = "unknown"  # it could not be checked
GOOD: Verdict = "good"


class Finding(msgspec.Struct, frozen=True):
    """One result. do: the command or the line that mends it, "" for what is good."""

    verdict: Verdict
    text: str
    do: str = ""


class Case(NamedTuple):
    """What a check judges. host: the host in question. first: the host on which the doctor was started; the same host
    when it judges only that one. ports: None unless the nodes were asked."""

    host: HostFacts
    first: HostFacts
    site: SiteFacts
    ports: Ports | None = None


@dataclass(frozen=True)
class Asked:
    """A host that looks at itself."""

    question: Question
    config: Config = field(default_factory=Config)
    """Its unicron.toml, as far as that has a meaning."""
    config_facts: ConfigFacts = field(default_factory=ConfigFacts)
    plugin: PluginFacts = field(default_factory=PluginFacts)
    agent: str = ""
    """The path in the plugin's line, "" without one."""


class Check(NamedTuple):
    """One check. roles: hosts on which it makes sense; none for a check of the whole cluster, which is judged once.
    judge: yields its findings, each worded with what to do. collect: fields of HostFacts -> what makes their values."""

    name: str
    roles: frozenset[str]
    judge: Callable[[Case], Iterator[Finding]]
    collect: dict[str, Callable[[Asked], Any]] = {}


def good(text: str) -> Finding:
    return Finding(GOOD, text)


def problem(text: str, do: str) -> Finding:
    return Finding(PROBLEM, text, do)


def advice(text: str, do: str) -> Finding:
    return Finding(ADVICE, text, do)


def unknown(text: str, do: str = "") -> Finding:
    return Finding(UNKNOWN, text, do)
