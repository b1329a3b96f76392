"""`unicron.toml`: where it is found, what it may say, and the defaults. `Config.check` rejects time-outs that
contradict each other.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from unicron_ctl.errors import WRONG_USE, UserError

DEFAULT_PORT = 7451
AUTH = ("munge", "none")
SLURM = ("auto", "command", "none")
THROUGHPUT = ("measured", "linear")
ADMISSION = ("require", "prefer", "off")
# Parts of the file that belong to others; the controller neither reads nor rejects them.
OTHER_SECTIONS = ("severity", "planner", "health")


class ControllerConfig(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The section [controller]; all times are in seconds.

    Connections
        public_key: encrypt all traffic with the controller that has its secret (`unicrond --make-key`).
        heartbeat_period: between two messages of an agent without news; lease_periods: so many of them without a
        message and the node counts as lost. hint_grace: how long an agent whose end Slurm reported may take to prove
        that it lives; restart_grace: how long agents may take to come back after the controller was restarted.
        repeat_seconds: between two copies of an order that was not obeyed yet.
    Generations
        forming_settle_seconds: how long a job waits for further nodes before it starts. offer_delay: newcomers are
        taken in together when they come within it. fault_grace: how long a rank that stopped by itself waits for the
        cause to show (its peers die of its death). report_timeout, enter_timeout: how long a survivor may take to
        stop, a member to enter. join_after_seconds: in restart mode newcomers are taken in together when none has
        come for so long; checkpoint_seconds: how often such scripts save their state.
    Monitoring
        monitor_iterations: judge iteration times at all. hang_floor_seconds: no iteration is taken for hung sooner.
        hang_outside_seconds: how long the script's own code between two iterations (a checkpoint, an evaluation) may
        take; hang_idle_seconds: the same for a process that does nothing meanwhile, where that code was short so far.
        first_iteration_seconds: how long a job's first iteration may take (it compiles, opens its data).
        stacks_seconds: how long the stacks of a hanging rank are waited for before it is stopped. metrics_seconds:
        between two rounds of metrics that nodes and ranks are compared by, 0 for none; metrics_directory: whose
        latency is measured on each node, by default a local one.
    Actions
        regroup_seconds, restart_seconds, isolate_seconds: how long an action may take before it has failed and the
        next severity follows: all train again; a started process takes part; a node is down in Slurm and its element
        runs elsewhere. max_isolated_nodes, max_isolated_share, max_isolated_job_share, isolation_window_seconds:
        without an admin, living nodes are set down only while those set down within the window are at most so many,
        or this share of the cluster if that is more, and at most this share of the job's own nodes (one is always
        allowed). act_on_node_events: isolate a node on the word of its kernel alone; false records it only.
        admission: a node that was set down comes back after passing its health checks: "require" them, "prefer" them
        (after admission_seconds without any it comes back unverified), "off". allow_inject: let `unicronctl inject`
        break jobs on purpose.
    Planning
        mtbf_node_hours, transition_seconds: what the planner reckons with. throughput: "measured" fits T(t,x) to all
        sizes at which the job (or an earlier one of its name) has run, "linear" trusts one size and scales it.
    """

    listen: str = f"tcp://0.0.0.0:{DEFAULT_PORT}"
    state_dir: str = ""
    public_key: str = ""
    auth: str = "munge"
    admins: list[str] = []
    observe: bool = False
    allow_inject: bool = False
    slurm: str = "auto"
    slurm_poll_seconds: float = 2.0
    slurm_timeout: float = 10.0
    heartbeat_period: float = 1.0
    lease_periods: float = 1.8
    forming_settle_seconds: float = 5.0
    offer_delay: float = 0.2
    fault_grace: float = 0.15
    hint_grace: float = 0.3
    report_timeout: float = 10.0
    enter_timeout: float = 30.0
    restart_grace: float = 5.0
    repeat_seconds: float = 0.5
    probe_timeout: float = 0.5
    monitor_iterations: bool = True
    hang_floor_seconds: float = 1.0
    hang_outside_seconds: float = 600.0
    hang_idle_seconds: float = 60.0
    first_iteration_seconds: float = 600.0
    metrics_seconds: float = 10.0
    metrics_directory: str = ""
    stacks_seconds: float = 1.0
    regroup_seconds: float = 300.0
    restart_seconds: float = 600.0
    isolate_seconds: float = 300.0
    max_isolated_nodes: int = 2
    max_isolated_share: float = 0.1
    max_isolated_job_share: float = 0.5
    isolation_window_seconds: float = 600.0
    admission: str = "prefer"
    admission_seconds: float = 30.0
    quick_death_seconds: float = 20.0
    quick_deaths: int = 3
    throughput: str = "measured"
    join_after_seconds: float = 5.0
    checkpoint_seconds: float = 1800.0
    mtbf_node_hours: float = 1000.0
    transition_seconds: float = 5.0
    act_on_node_events: bool = True

    @property
    def lease(self) -> float:
        """Seconds without a message after which a node counts as lost."""
        return self.heartbeat_period * self.lease_periods


class AgentConfig(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The section [agent], read by the agents on their nodes.

    node_events: watch the kernel log, memory cgroup and links at all. kmsg: where the kernel log is read (the variable
    UNICRON_KMSG goes before). link_seconds: between two looks at the links' counters.
    """

    node_events: bool = True
    kmsg: str = "/dev/kmsg"
    link_seconds: float = 5.0


class Config(msgspec.Struct, kw_only=True):
    """The whole file. `severity` is handed to the classifier as it is."""

    controller: ControllerConfig = msgspec.field(default_factory=ControllerConfig)
    agent: AgentConfig = msgspec.field(default_factory=AgentConfig)
    severity: dict[str, Any] = {}
    path: str = ""

    def check(self) -> Config:
        """The configuration itself, or UserError with the first contradiction."""
        for problem in problems(self.controller):
            raise UserError(f"{self.path or 'configuration'}: [controller] {problem}", WRONG_USE)
        if not 0.1 <= self.agent.link_seconds <= 3600:
            seconds = f"link_seconds = {self.agent.link_seconds:g}"
            raise UserError(f"{self.path or 'configuration'}: [agent] {seconds} must be 0.1 to 3600", WRONG_USE)
        return self


_POSITIVE = (
    "slurm_poll_seconds",
    "slurm_timeout",
    "heartbeat_period",
    "forming_settle_seconds",
    "report_timeout",
    "enter_timeout",
    "restart_grace",
    "repeat_seconds",
    "probe_timeout",
    "mtbf_node_hours",
    "quick_death_seconds",
    "admission_seconds",
    "hint_grace",
    "hang_floor_seconds",
    "hang_outside_seconds",
    "hang_idle_seconds",
    "first_iteration_seconds",
    "regroup_seconds",
    "restart_seconds",
    "isolate_seconds",
    "isolation_window_seconds",
)
_NOT_NEGATIVE = (
    "offer_delay",
    "fault_grace",
    "transition_seconds",
    "stacks_seconds",
    "metrics_seconds",
    "join_after_seconds",
    "checkpoint_seconds",
)


def problems(c: ControllerConfig) -> list[str]:
    """What contradicts itself, each with what to do about it; empty when all is well."""
    found = [
        f"{name} = {getattr(c, name):g} must be above 0"
        for name in _POSITIVE
        if not 0 < getattr(c, name) < float("inf")
    ]
    found += [
        f"{name} = {getattr(c, name):g} must be 0 or more"
        for name in _NOT_NEGATIVE
        if not 0 <= getattr(c, name) < float("inf")
    ]
    if c.auth not in AUTH:
        found.append(f'auth = "{c.auth}": use one of {", ".join(AUTH)}')
    if c.slurm not in SLURM:
        found.append(f'slurm = "{c.slurm}": use one of {", ".join(SLURM)}')
    if c.admission not in ADMISSION:
        found.append(f'admission = "{c.admission}": use one of {", ".join(ADMISSION)}')
    if c.throughput not in THROUGHPUT:
        found.append(f'throughput = "{c.throughput}": use one of {", ".join(THROUGHPUT)}')
    if not c.listen.startswith("tcp://") or not c.listen.rpartition(":")[2].isdigit():
        found.append(f'listen = "{c.listen}": write tcp://ADDRESS:PORT')
    if c.quick_deaths < 1:
        found.append(f"quick_deaths = {c.quick_deaths} must be 1 or more")
    if c.max_isolated_nodes < 0:
        found.append(f"max_isolated_nodes = {c.max_isolated_nodes} must be 0 or more")
    found += [
        f"{name} = {getattr(c, name):g} must be 0 to 1"
        for name in ("max_isolated_share", "max_isolated_job_share")
        if not 0 <= getattr(c, name) <= 1
    ]
    if found:
        return found
    if not 1.1 <= c.lease_periods <= 100:
        found.append(
            f"lease_periods = {c.lease_periods:g} must be 1.1 to 100: one late heartbeat must not look like a lost node"
        )
    if c.repeat_seconds >= c.report_timeout:
        found.append(
            f"report_timeout = {c.report_timeout:g} must be above repeat_seconds = {c.repeat_seconds:g}: "
            "a lost message is repeated first"
        )
    if c.enter_timeout < c.lease:
        found.append(
            f"enter_timeout = {c.enter_timeout:g} must be at least heartbeat_period x lease_periods = {c.lease:g}: "
            "a lost node is found by its lease first"
        )
    if c.report_timeout < c.lease:
        found.append(
            f"report_timeout = {c.report_timeout:g} must be at least heartbeat_period x lease_periods = {c.lease:g}"
        )
    if c.restart_grace < c.heartbeat_period:
        found.append(
            f"restart_grace = {c.restart_grace:g} must be at least heartbeat_period = {c.heartbeat_period:g}: "
            "agents come back at their next heartbeat"
        )
    if c.regroup_seconds <= c.report_timeout:
        found.append(
            f"regroup_seconds = {c.regroup_seconds:g} must be above report_timeout = {c.report_timeout:g}: "
            "survivors that do not stop are found by that first"
        )
    if 0 < c.metrics_seconds < 1:
        found.append(f"metrics_seconds = {c.metrics_seconds:g} must be 1 or more, or 0 for none")
    if c.fault_grace >= c.report_timeout:
        found.append(f"fault_grace = {c.fault_grace:g} must be below report_timeout = {c.report_timeout:g}")
    return found


def search_path(environment: Mapping[str, str] = os.environ) -> list[Path]:
    """Where the file is looked for when nobody names it, first hit wins."""
    named = environment.get("UNICRON_CONFIG")
    home = Path(environment.get("XDG_CONFIG_HOME") or Path(environment.get("HOME", "/")) / ".config")
    return ([Path(named)] if named else []) + [home / "unicron" / "unicron.toml", Path("/etc/unicron/unicron.toml")]


def load(path: str | Path | None = None, environment: Mapping[str, str] = os.environ) -> Config:
    """The checked configuration from `path`, or from the search path, or all defaults. Raises UserError, one line."""
    if path is None:
        named = environment.get("UNICRON_CONFIG")
        if named and not Path(named).is_file():
            raise UserError(f"UNICRON_CONFIG={named}: no such file; unset it or write the file", WRONG_USE)
        path = next((candidate for candidate in search_path(environment) if candidate.is_file()), None)
        if path is None:
            return Config()
    try:
        with open(path, "rb") as file:
            raw = tomllib.load(file)
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}; name an existing file with --config", WRONG_USE) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: not TOML: {error}", WRONG_USE) from None
    return parse(raw, str(path))


def parse(raw: Mapping[str, Any], path: str = "") -> Config:
    """The configuration in a mapping that was read from TOML. Raises UserError."""
    for section in raw:
        if section not in ("controller", "agent", *OTHER_SECTIONS):
            raise UserError(
                f"{path or 'configuration'}: unknown section [{section}]: "
                f"use [controller], [agent] or one of {', '.join(OTHER_SECTIONS)}",
                WRONG_USE,
            )
    try:
        # strict=False lets `1` stand for 1.0; TOML has typed everything else already.
        section = "controller"
        controller = msgspec.convert(raw.get("controller", {}), ControllerConfig)
        section = "agent"
        agent = msgspec.convert(raw.get("agent", {}), AgentConfig)
    except msgspec.ValidationError as error:
        raise UserError(f"{path or 'configuration'}: [{section}] {error}", WRONG_USE) from None
    severity = raw.get("severity", {})
    return Config(
        controller=controller, agent=agent, severity=dict(severity) if isinstance(severity, Mapping) else {}, path=path
    ).check()


def state_dir(config: Config, environment: Mapping[str, str] = os.environ) -> Path:
    """The controller's state folder: the configured one, else /var/lib/unicron for root, else below the user's home."""
    if config.controller.state_dir:
        return Path(config.controller.state_dir).expanduser()
    if os.geteuid() == 0:
        return Path("/var/lib/unicron")
    home = environment.get("XDG_STATE_HOME") or str(Path(environment.get("HOME", "/tmp")) / ".local" / "state")
    return Path(home) / "unicron"


def controller_address(
    explicit: str | None = None, config: Config | None = None, environment: Mapping[str, str] = os.environ
) -> str:
    """Where clients reach the controller: the option, UNICRON_CONTROLLER, what the running controller wrote, the
    configuration.
    """
    if explicit:
        return explicit
    if environment.get("UNICRON_CONTROLLER"):
        return environment["UNICRON_CONTROLLER"]
    config = config or load(environment=environment)
    try:
        written = (state_dir(config, environment) / "address").read_text().strip()
    except OSError:
        written = ""
    return written or config.controller.listen.replace("://0.0.0.0:", "://127.0.0.1:").replace("://*:", "://127.0.0.1:")
