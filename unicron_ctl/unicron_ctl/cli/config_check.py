"""`unicronctl config check`: what unicron.toml lets the controller do in each partition of the real cluster."""

from __future__ import annotations

import os

import click
import msgspec

from unicron_ctl.shared.commands.options import print_json
from unicron_ctl.shared.settings.config import Config, port_notes
from unicron_ctl.shared.settings.config_file import examine
from unicron_ctl.shared.settings.partitions import ACT, DEFAULT, PERMISSIONS
from unicron_ctl.shared.slurm import CommandLineClient, PartitionInfo, SlurmError
from unicron_ctl.shared.system.columns import Listing, show
from unicron_ctl.shared.system.errors import PROBLEM_FOUND
from unicron_ctl.shared.system.printable import print_text

RETURN_TO_SERVICE_ALWAYS = 2
RETURNS = (
    "slurm.conf: ReturnToService=2 gives a node that was set down back when its slurmd registers, without the checks "
    "of [controller] admission: set it to 1"
)


class PartitionReport(msgspec.Struct, kw_only=True):
    """The permissions in one partition."""

    partition: str
    nodes: int | None
    """Null if Slurm has no such partition."""
    state: str | None
    """Its state in Slurm; null if Slurm has no such partition."""
    mode: str
    actions: list[str]
    max_weight: float
    accounts: dict[str, float]
    qos: dict[str, float]
    spare_nodes: int


class ConfigReport(msgspec.Struct, kw_only=True):
    """The JSON of `unicronctl config check`."""

    file: str
    problems: list[str]
    warnings: list[str]
    slurm: str
    """Why Slurm could not be asked, else ""."""
    partitions: list[PartitionReport]


@click.group("config")
def command() -> None:
    """Check unicron.toml."""


@command.command()
@click.option("--config", "path", type=click.Path(), help="The file [default: as unicrond finds it].")
@click.option("--json", "as_json", is_flag=True, help="For programs; the keys are stable.")
def check(path: str | None, as_json: bool) -> int:
    """Print every problem, and what is allowed in each partition that Slurm has.

    The exit status is 3 if there is a problem.
    """
    config, problems = examine(path, os.environ)
    error, listed, warnings = "", [], port_notes(config.controller)
    try:
        if config.controller.slurm != "none":
            client = CommandLineClient(timeout=config.controller.slurm_timeout)
            listed = client.partitions()
            if client.return_to_service() == RETURN_TO_SERVICE_ALWAYS:
                warnings.append(RETURNS)
    except SlurmError as failed:
        error = str(failed)
    reports = permissions(config, listed)
    names = {one.name for one in listed}
    if listed:
        problems += [
            f"[partition.{name}]: Slurm has no such partition: it has {', '.join(sorted(names))}"
            for name in config.controller.partitions
            if name != DEFAULT and name not in names
        ]
    if as_json:
        print_json(
            ConfigReport(file=config.path, problems=problems, warnings=warnings, slurm=error, partitions=reports)
        )
    else:
        print_text(config.path or "no file: the defaults")
        show([table(reports)])
        if error:
            print_text(f"Slurm's partitions are not known: {error}", err=True)
        for problem in (*warnings, *problems):
            print_text(problem, err=True)
    return PROBLEM_FOUND if problems else 0


def permissions(config: Config, listed: list[PartitionInfo]) -> list[PartitionReport]:
    """Return the permissions in Slurm's partitions, in others that the file names, and in all others ("default")."""
    infos = {one.name: one for one in listed}
    reports = []
    others = sorted(config.controller.partitions.keys() - infos.keys() - {DEFAULT})
    for name in (*infos, *others, DEFAULT):
        rules, info = config.controller.rules("" if name == DEFAULT else name), infos.get(name)
        reports.append(
            PartitionReport(
                partition=name,
                nodes=info.nodes if info else None,
                state=info.state if info else None,
                mode=rules.mode,
                actions=[one for one in PERMISSIONS if one in rules.actions] if rules.mode == ACT else [],
                max_weight=rules.max_weight,
                accounts=dict(rules.accounts),
                qos=dict(rules.qos),
                spare_nodes=rules.spare_nodes,
            )
        )
    return reports


def table(reports: list[PartitionReport]) -> Listing:
    """Return a table with a line for each partition."""
    partitions = Listing("partition", "nodes", "state", "mode", "spare", "weight", "actions", optional=["spare"])
    for one in reports:
        claims = [f"{name}={most:g}" for limits in (one.accounts, one.qos) for name, most in sorted(limits.items())]
        partitions.add_row(
            one.partition,
            "-" if one.nodes is None else str(one.nodes),
            one.state or "-",
            one.mode,
            str(one.spare_nodes),
            ",".join([f"{one.max_weight:g}", *claims]),
            "all" if len(one.actions) == len(PERMISSIONS) else ",".join(one.actions) or "none",
        )
    return partitions
