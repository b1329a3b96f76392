"""`unicronctl doctor`: finds what is wrong with the installation, on this host or on all nodes."""

from __future__ import annotations

import dataclasses
import os
from typing import get_args

import click
import msgspec

from unicron_ctl.doctor import host_facts, on_nodes, site_facts
from unicron_ctl.doctor.examination import DoctorResult, by_weight, examine, no_answer, summary
from unicron_ctl.doctor.facts import COMPUTE, GOOD, PROBLEM, HostFacts, Ports, Question, Role, SiteFacts
from unicron_ctl.shared.commands.options import controller_option, print_json
from unicron_ctl.shared.settings.config import Config
from unicron_ctl.shared.slurm import CommandLineClient
from unicron_ctl.shared.slurm.host_lists import fold
from unicron_ctl.shared.slurm.steps import search_path
from unicron_ctl.shared.system.errors import PROBLEM_FOUND, UserError
from unicron_ctl.shared.system.printable import print_text
from unicron_detector.words import plural

NOT_FROM_HERE = "ports are tried from the controller's host: run `unicronctl doctor --all` there"


class DoctorReport(msgspec.Struct, kw_only=True):
    """The JSON of `unicronctl doctor`."""

    role: str
    """The role of this host."""
    hosts: list[str]
    """All hosts that answered."""
    results: list[DoctorResult]


@click.command(name="doctor")
@click.option("--as", "role", type=click.Choice(get_args(Role)), help="What this host is [default: it is found out].")
@click.option("--all", "everywhere", is_flag=True, help="Ask all nodes as well, with one Slurm step on each.")
@click.option("--partition", "chosen", multiple=True, metavar="P", help="With --all: only the nodes of P.")
@click.option("--config", "path", type=click.Path(dir_okay=False), help="The file [default: as programs find it].")
@click.option("--python", metavar="FILE", help="With --all: the nodes' Python that has Unicron.")
@click.option(
    "--queue", type=click.IntRange(1, 3600), default=10, show_default=True, help="Seconds to wait for the nodes."
)
@click.option("-v", "--verbose", is_flag=True, help="Show what is good, too.")
@click.option("--step", hidden=True, metavar="QUESTION", help="What --all runs on each node.")
@click.option("--json", "as_json", is_flag=True, help="For programs; the keys are stable.")
@controller_option()
def command(
    role: Role | None,
    everywhere: bool,
    chosen: tuple[str, ...],
    path: str | None,
    python: str | None,
    queue: int,
    verbose: bool,
    step: str | None,
    as_json: bool,
    controller: str | None,
) -> int:
    """Check the installation, and say what to type where something is wrong.

    Nothing is changed. The exit status is 3 if there is a problem.
    """
    if step:
        return host_facts.main([step])
    if chosen and not everywhere:
        raise click.UsageError("--partition is for --all")
    if path:
        os.environ["UNICRON_CONFIG"] = path  # for functions that find the file themselves
    client = CommandLineClient(env={"PATH": search_path()["PATH"]})
    config, _ = host_facts.read_config(path or "")
    site = site_facts.ask_slurm(client, config)
    mine = role or site_facts.find_role(site, config)
    here = host_facts.collect(site_facts.question_for(mine, site, path or "", controller or ""))
    name, level, why = site_facts.controllers_level(client, site, here)
    site = dataclasses.replace(site, controller_name=name, admin_level=level, level_problem=why)
    if name:
        here.users.setdefault(name, here.controller.uid)
    hosts = [here]
    if everywhere:
        wish = on_nodes.Wish(on_nodes.interpreter(python) if python else (), queue=queue)
        question = site_facts.question_for(COMPUTE, site, path or "", controller or "")
        found, left_out, ports = _ask_nodes(site, config, question, wish, chosen)
        hosts += [host for host in found.hosts if host.name != here.name]
        results = [*examine(hosts, site, ports, left_out.items()), *no_answer(found.silent)]
    else:
        results = examine(hosts, site)
    if as_json:
        print_json(DoctorReport(role=mine, hosts=[host.name for host in hosts], results=results), indent=2)
    else:
        _print(hosts, results, verbose)
    return PROBLEM_FOUND if any(result.verdict == PROBLEM for result in results) else 0


def _ask_nodes(
    site: SiteFacts, config: Config, question: Question, wish: on_nodes.Wish, chosen: tuple[str, ...]
) -> tuple[on_nodes.NodeAnswers, dict[str, str], Ports]:
    """Return the nodes' answers, the nodes that could not be asked with the reasons, and the nodes' ports.

    Raises UserError if no node answers.
    """
    if site.slurm_problem:
        raise UserError(f"the nodes cannot be asked: {site.slurm_problem}")
    marked = site_facts.partitions_in_use(config, site.partitions)
    if unknown := [name for name in chosen if name not in {one.name for one in site.partitions}]:
        raise UserError(f"Slurm has no partition {unknown[0]}: it has {', '.join(p.name for p in site.partitions)}", 2)
    steps, left_out = on_nodes.groups(site.nodes, chosen or marked)
    if not steps:
        why = next(iter(left_out.values()), 'no partition is marked: set mode = "observe" in [partition.NAME]')
        raise UserError(f"no node can be asked now: {why}")
    at_head = site_facts.is_controllers_host(question.controller, config)
    reach = {node.name: node.address for node in site.nodes} if at_head else None
    found = on_nodes.Asking(question, wish, search_path(), reach).run(steps)
    if not found.hosts:
        node, why = next(iter(found.silent.items()))
        raise UserError(f"no node gave an answer; {node}: {why}")
    if not at_head:
        return found, left_out, Ports(why_not=NOT_FROM_HERE)
    asked = {name for _, names in steps for name in names}
    slurmds = on_nodes.cannot_reach_slurmds([node for node in site.nodes if node.name in asked])
    return found, left_out, Ports(agents=found.doors, slurmds=slurmds)


def _print(hosts: list[HostFacts], results: list[DoctorResult], verbose: bool) -> None:
    names = [host.name for host in hosts]
    role = hosts[0].role if len(hosts) == 1 else f"{hosts[0].role}, and {plural(len(hosts) - 1, 'node')}"
    print_text(f"{names[0]} ({role}), Unicron {hosts[0].release}")
    for result in by_weight(results):
        if result.verdict == GOOD and not verbose:
            continue
        where = ""
        if result.hosts and len(hosts) > 1:
            where = f" ({'all hosts' if result.hosts == names else fold(result.hosts)})"
        print_text(f"{result.verdict:8} {result.check}{where}: {result.text}")
        if result.do:
            print_text(f"{'':8} > {result.do}")
    print_text(summary(results))
