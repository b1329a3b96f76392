"""Asks Slurm about the cluster, and finds out this host's role."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable, Mapping
from pathlib import Path

from unicron_ctl.doctor.facts import COMPUTE, HEAD, LOGIN, HostFacts, Question, Role, SiteFacts
from unicron_ctl.doctor.host_checks import processes
from unicron_ctl.doctor.plugstack import candidates
from unicron_ctl.doctor.reach_checks import user_name
from unicron_ctl.shared.settings.config import Config
from unicron_ctl.shared.settings.partitions import OFF
from unicron_ctl.shared.settings.places import controller_address, is_guess
from unicron_ctl.shared.slurm.command_line import CommandLineClient
from unicron_ctl.shared.slurm.slurm_client import PartitionInfo, SlurmError
from unicron_ctl.shared.slurm.slurm_settings import SlurmSettings
from unicron_ctl.shared.system.addresses import endpoints, is_loopback, is_own, resolve_all
from unicron_ctl.shared.system.errors import UserError


def ask_slurm(client: CommandLineClient, config: Config) -> SiteFacts:
    """Ask Slurm about the cluster. If it does not answer, the result has a `slurm_problem`."""
    try:
        settings = client.settings()
        return SiteFacts(
            settings=settings, nodes=tuple(client.nodes()), partitions=tuple(client.partitions()), config=config
        )
    except SlurmError as error:
        return SiteFacts(slurm_problem=str(error), config=config)


def controllers_level(client: CommandLineClient, site: SiteFacts, here: HostFacts) -> tuple[str, str, str]:
    """Return the name of the controller's user on this host, its AdminLevel, and why the level is not known."""
    if here.controller.problem:
        return "", "", "the controller does not answer, so its user is not known"
    name = user_name(here.controller.uid)
    if "slurmdbd" not in site.settings.text("AccountingStorageType"):
        return name, "", ""
    try:
        return name, client.admin_level(name), ""
    except SlurmError as error:
        return name, "", str(error)


def find_role(site: SiteFacts, config: Config, environment: Mapping[str, str] = os.environ) -> Role:
    """Return this host's role: of a node within a job, the controller's or slurmctld's host, a node with a slurmd, or
    else a login node."""
    if environment.get("SLURMD_NODENAME"):
        return COMPUTE
    here = socket.gethostname().split(".")[0]
    runs_controller = processes("unicrond") or processes("slurmctld")
    if runs_controller or here in site.settings.head_hosts() or is_controllers_host("", config):
        return HEAD
    if processes("slurmd") or any(node.name == here for node in site.nodes):
        return COMPUTE
    return LOGIN


def is_controllers_host(explicit: str, config: Config) -> bool:
    """Whether one of the controller's addresses, or a standby's, is this machine's own."""
    if is_guess(explicit or None, config):
        return False
    try:
        targets = resolve_all(endpoints(controller_address(explicit or None, config)))
    except (UserError, OSError):
        return False
    return any(is_loopback(target.host) or is_own(target) for target in targets)


def question_for(role: Role, site: SiteFacts, config: str = "", controller: str = "") -> Question:
    """Return the question to a host of this role."""
    settings = site.settings
    conf = os.environ.get("SLURM_CONF") or settings.text("SLURM_CONF")
    name, _ = settings.user()
    return Question(
        role=role,
        config=config,
        controller=controller,
        plugstack=candidates(settings.text("PlugStackConfig"), conf, settings.text("SlurmdSpoolDir")),
        plugin_dir=settings.text("PluginDir"),
        prolog=patterns(settings, "Prolog"),
        epilog=patterns(settings, "Epilog"),
        health_program=settings.text("HealthCheckProgram"),
        users=list(dict.fromkeys(name for name in (name, site.controller_name) if name)),
    )


def patterns(settings: SlurmSettings, name: str) -> list[str]:
    """Return the paths of Prolog or Epilog, with wildcards. A relative path is beside slurm.conf."""
    folder = Path(settings.text("SLURM_CONF") or "/etc/slurm/slurm.conf").parent
    return [str(folder / word) for word in settings.words(name)]


def partitions_in_use(config: Config, partitions: Iterable[PartitionInfo]) -> list[str]:
    """Return Slurm's partitions in which Unicron is not switched off."""
    return [one.name for one in partitions if config.controller.rules(one.name).mode != OFF]
