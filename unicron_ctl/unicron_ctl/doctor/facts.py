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
    """The question to a host: where it is to look. Empty texts and lists: Slurm did not say, or it is not set."""

    role: Role
    config: str = ""
    """unicron.toml, "" where programs find it themselves."""
    controller: str = ""
    """The address to ask in place of that file's."""
    plugstack: list[str] = []
    """Files of which the first that exists counts."""
    plugin_dir: str = ""
    """Slurm's PluginDir, folders with colons."""
    prolog: list[str] = []
    """As in slurm.conf, with wildcards."""
    epilog: list[str] = []
    health_program: str = ""
    users: list[str] = []
    """Names whose numbers are wanted."""
    door: float = 0.0
    """Seconds for which a port is opened, for the controller's host to try; 0 for none."""


class ConfigFacts(msgspec.Struct, kw_only=True):
    """A host's unicron.toml."""

    path: str = ""
    """ "" without one."""
    digest: str = ""
    """Of its bytes."""
    problems: list[str] = []
    """In one line each."""
    address: str = ""
    """Several have commas between them."""
    auth: str = "munge"
    believed: dict[str, int | None] = {}
    """Uids of `controller_users` on this host; None for a name that it does not know."""


class ControllerFacts(msgspec.Struct, kw_only=True):
    """The controller's answer."""

    address: str = ""
    problem: str = ""
    """Why nothing came, else ""."""
    tcp: bool | None = None
    """Whether its port takes connections; None where that was not tried."""
    release: str = ""
    uid: int = 0
    ahead: float = 0.0
    """Seconds by which its clock is ahead of this host's, known to +- `within`."""
    within: float = 0.0


class PluginFacts(msgspec.Struct, kw_only=True):
    """The plugin's line and its file."""

    plugstack: str = ""
    """The file that Slurm reads, "" where there is none."""
    line: str = ""
    """ "" where none names unicron.so."""
    path: str = ""
    is_there: bool = False
    required: bool = False
    release: str = ""
    """The release that it was built as, "" where the file does not say."""
    slurm: str = ""
    """The Slurm that it was built for."""
    controller: str = ""
    config: str = ""
    late: list[str] = []
    """Container plugins that come after it."""


class AgentFacts(msgspec.Struct, kw_only=True):
    """The program in the plugin's line."""

    path: str = ""
    problem: str = ""
    """Why it cannot be executed, else ""."""
    release: str = ""


class ScriptFacts(msgspec.Struct, kw_only=True):
    """Programs that Slurm starts on a node."""

    found: list[str] = []
    """Those that the setting leads to."""
    ours: list[str] = []
    """Those among them that call Unicron's."""
    blocked: list[str] = []
    """Ours that cannot be executed."""


class HealthFacts(msgspec.Struct, kw_only=True):
    """health.conf and prolog.conf."""

    conf: str = ""
    """ "" without one."""
    python: str = ""
    """UNICRON_PYTHON, or the scripts' default."""
    problem: str = ""
    """Why it cannot run the checks, else ""."""
    seconds: int = 0
    """The admission checks' time in the prolog; 0 where it does not run them."""


class ShmFacts(msgspec.Struct, kw_only=True):
    """/dev/shm, in bytes."""

    size: int = 0
    """0 where it is not mounted."""
    free: int = 0
    memory: int = 0
    """The host's."""


class KernelLogFacts(msgspec.Struct, kw_only=True):
    """The kernel log that agents read."""

    watched: bool = True
    """[agent] node_events."""
    path: str = "/dev/kmsg"
    restricted: bool = False
    """kernel.dmesg_restrict is 1."""
    is_there: bool = True
    readable: bool = True
    """Every user may read the file."""


class ContainerFacts(msgspec.Struct, kw_only=True):
    """Container runtimes."""

    enroot: bool = False
    enroot_mounts: bool = False
    enroot_missing: list[str] = []
    """Sources of Unicron's mounts that this host lacks."""
    apptainer: bool = False
    apptainer_binds: bool = False
    """Its configuration binds the agent's folder."""


class HostFacts(msgspec.Struct, kw_only=True):
    """One host. Nodes of another release send it, so fields may only be added."""

    name: str
    """Slurm's name of a node, else the host's."""
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
    """Why a credential cannot be made and read here, else ""."""
    users: dict[str, int | None] = {}
    """Uids by name, None for an unknown name."""
    plugin: PluginFacts = msgspec.field(default_factory=PluginFacts)
    agent: AgentFacts = msgspec.field(default_factory=AgentFacts)
    prolog: ScriptFacts = msgspec.field(default_factory=ScriptFacts)
    epilog: ScriptFacts = msgspec.field(default_factory=ScriptFacts)
    health_program: ScriptFacts = msgspec.field(default_factory=ScriptFacts)
    health: HealthFacts = msgspec.field(default_factory=HealthFacts)
    shm: ShmFacts = msgspec.field(default_factory=ShmFacts)
    limits: dict[str, int] = {}
    """By name, :data:`NO_LIMIT` for none."""
    infiniband: bool = False
    kernel_log: KernelLogFacts = msgspec.field(default_factory=KernelLogFacts)
    containers: ContainerFacts = msgspec.field(default_factory=ContainerFacts)
    unicrond_files: int | None = None
    """Files that the running unicrond may open; None where none runs here, or it cannot be seen."""


@dataclass(frozen=True)
class SiteFacts:
    """The cluster."""

    slurm_problem: str = ""
    """Why Slurm gave no answer, else ""."""
    settings: SlurmSettings = field(default_factory=SlurmSettings)
    nodes: tuple[NodeInfo, ...] = ()
    partitions: tuple[PartitionInfo, ...] = ()
    config: Config = field(default_factory=Config)
    """This host's unicron.toml, as far as it has a meaning."""
    controller_name: str = ""
    """The name of the controller's user on this host, "" while no controller has answered."""
    admin_level: str = ""
    """That user's level in slurmdbd, "" where it has none."""
    level_problem: str = ""
    """Why the level is not known."""


@dataclass(frozen=True)
class Ports:
    """The ports of nodes, as the controller's host reaches them: node -> why not, "" where it can."""

    agents: dict[str, str] = field(default_factory=dict)
    slurmds: dict[str, str] = field(default_factory=dict)
    why_not: str = ""
    """Why nothing was tried, else ""."""


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
    """The case that a check judges. host: the host in question. first: the host on which the doctor was started; the
    same host when it judges only that one. ports: None unless the nodes were asked."""

    host: HostFacts
    first: HostFacts
    site: SiteFacts
    ports: Ports | None = None


@dataclass(frozen=True)
class Inspection:
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
    collect: dict[str, Callable[[Inspection], Any]] = {}


def good(text: str) -> Finding:
    return Finding(GOOD, text)


def problem(text: str, do: str) -> Finding:
    return Finding(PROBLEM, text, do)


def advice(text: str, do: str) -> Finding:
    return Finding(ADVICE, text, do)


def unknown(text: str, do: str = "") -> Finding:
    return Finding(UNKNOWN, text, do)
