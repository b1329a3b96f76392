"""`unicronctl cluster`: a private Slurm cluster on this machine."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

import click

from unicron_ctl.lab.cluster import LocalCluster, protection
from unicron_ctl.lab.cluster.cluster_layout import Layout, default_state_dir
from unicron_ctl.lab.cluster.cluster_status import LinksStatus
from unicron_ctl.lab.cluster.link_faults import share_of
from unicron_ctl.shared.commands.options import print_json
from unicron_ctl.shared.system.columns import Listing, show
from unicron_ctl.shared.system.printable import print_text
from unicron_detector.words import plural

STATE_DIR = click.option(
    "--state-dir",
    type=click.Path(file_okay=False, path_type=Path),
    default=default_state_dir,
    show_default="$UNICRON_CLUSTER_DIR or ~/.local/state/unicron/cluster",
    help="Where the cluster's files are.",
)


@click.group("cluster")
def command() -> None:
    """Run a private Slurm cluster on this machine: slurmctld, munged and one slurmd per virtual node, as any user."""


@command.command()
@click.option("--nodes", type=click.IntRange(1, 256), default=6, show_default=True, help="Virtual nodes, n1 to nN.")
@click.option("--gpus-per-node", type=click.IntRange(0, 64), default=1, show_default=True, help="Pretended GPUs.")
@click.option("--auth", type=click.Choice(["munge", "none"]), default="munge", show_default=True)
@click.option("--plugstack", "plugstack_lines", multiple=True, metavar="LINE", help="A line of plugstack.conf.")
@click.option("--unicron", "protected", is_flag=True, help="With unicrond and the plugin: jobs can be healed.")
@click.option("--conf", "config_lines", multiple=True, metavar="LINE", help="A line of slurm.conf, e.g. Prolog=/path.")
@click.option("--topology", "topology_lines", multiple=True, metavar="LINE", help="A line of topology.conf (a tree).")
@click.option(
    "--family",
    default="ipv4",
    metavar="ipv4|ipv6|both",
    help="Family of the addresses, with --links.",
    show_default=True,
)
@click.option("--links", is_flag=True, help="Each node in a network namespace of its own, with a link. Needs root.")
@click.option("--accounting", is_flag=True, help="With slurmdbd and a private MariaDB, for sacct.")
@STATE_DIR
def up(
    nodes: int,
    gpus_per_node: int,
    auth: str,
    plugstack_lines: tuple[str, ...],
    protected: bool,
    config_lines: tuple[str, ...],
    topology_lines: tuple[str, ...],
    family: str,
    links: bool,
    accounting: bool,
    state_dir: Path,
) -> None:
    """Start the cluster, or what is missing of it."""
    layout = Layout(state_dir)
    fresh = protected and not protection.running(layout)
    if protected:
        protection.plugin_line("")  # before anything is started
        if fresh and not LocalCluster(state_dir).processes():
            protection.forget(layout)
        plugstack_lines = (*plugstack_lines, protection.plugin_line(protection.start(layout)))
    lines = plugstack_lines, auth, config_lines
    cluster = LocalCluster(state_dir, nodes, gpus_per_node, *lines, links, topology_lines, accounting, family)
    try:
        cluster.up()
    except BaseException:
        if fresh:
            protection.stop(layout)
        raise
    are_up = "is up; reach it" if nodes == 1 else "are up; reach them"
    print_text(f"{plural(nodes, 'node')} {are_up} with: export SLURM_CONF={cluster.env()['SLURM_CONF']}")
    if protected:
        print_text('Unicron is on them: eval "$(unicronctl cluster env)", then sbatch --unicron ...')


@command.command()
@STATE_DIR
def env(state_dir: Path) -> None:
    """Print what a shell needs to use the cluster: eval "$(unicronctl cluster env)"."""
    cluster = LocalCluster.load(state_dir)
    words = cluster.env() | {"PATH": protection.search_path()}
    if address := protection.address(cluster.layout):
        words["UNICRON_CONTROLLER"] = address
    for name, value in words.items():
        print_text(f"export {name}={shlex.quote(value)}")


@command.command()
@STATE_DIR
def down(state_dir: Path) -> None:
    """End the cluster and everything that runs on it."""
    cluster = LocalCluster(state_dir)
    protection.stop(cluster.layout)
    cluster.down()
    print_text("the cluster is down")


@command.command()
@click.option("--json", "as_json", is_flag=True, help="For programs; the keys are stable.")
@STATE_DIR
def status(as_json: bool, state_dir: Path) -> None:
    """Show the daemons and what Slurm says of each node."""
    state = LocalCluster.load(state_dir).status()
    if as_json:
        print_json(state, indent=2)
        return
    print_text(f"cluster  {state.state}  in {state.state_dir}  port {state.port}  auth {state.auth}")
    if state.links:
        print_text(f"network  {state.links.network}  {_fault_text(state.links) or 'all links are whole'}")
    table = Listing("node", "slurmd", "tasks", "state")
    for node in state.nodes:
        why = f"  ({node.reason})" if node.reason else ""
        states = "+".join(node.states) or "unknown"
        table.add_row(node.name, str(node.slurmd or "-"), str(node.tasks), f"{states}{why}")
    show([table])


def _fault_text(links: LinksStatus) -> str:
    parts = [f"{host} without power" for host in links.off]
    parts += [f"{host} cut off" for host in links.cut]
    parts += [f"{a} and {b} cut apart" for a, b in links.apart]
    parts += [f"{host} loses {100 * share:.4g}%" for host, share in links.loss.items()]
    return ", ".join(parts)


def _hosts(word: str) -> list[str]:
    """Read a group of hosts: n1,n2 or head."""
    return [host for host in word.split(",") if host]


def _groups(_context: click.Context, _parameter: click.Parameter, words: tuple[str, ...]) -> list[list[str]]:
    """Read one or two groups of hosts, and always return two."""
    if len(words) > 2:
        raise click.UsageError("name one or two groups of hosts; those of a group with a comma between: n1,n2")
    return [*map(_hosts, words), [], []][:2]


_one_or_two = click.argument("hosts", nargs=-1, metavar="[HOSTS [HOSTS]]", callback=_groups)


@command.command()
@_one_or_two
@STATE_DIR
def cut(hosts: list[list[str]], state_dir: Path) -> None:
    """Drop all packets to and from HOSTS (nodes or head, n1,n2), or, with two groups, all between the two.

    No host notices: no connection is closed, and the links' carriers stay.
    """
    if not hosts[0]:
        raise click.UsageError("name a node, or head")
    LocalCluster.load(state_dir).links.cut(*hosts)
    print_text(f"{','.join(hosts[0])} {'and ' + ','.join(hosts[1]) + ' are cut apart' if hosts[1] else 'cut off'}")


@command.command()
@_one_or_two
@STATE_DIR
def heal(hosts: list[list[str]], state_dir: Path) -> None:
    """Mend all links, or those of HOSTS, or those between two groups. A node without power stays off."""
    LocalCluster.load(state_dir).links.heal(*hosts)
    print_text("healed")


@command.command()
@click.argument("hosts", callback=lambda _c, _p, word: _hosts(word))
@click.argument("share", callback=lambda _c, _p, word: share_of(word))
@STATE_DIR
def loss(hosts: list[str], share: float, state_dir: Path) -> None:
    """Lose SHARE (10%) of the packets to and from each of HOSTS, at random; 0% ends it."""
    LocalCluster.load(state_dir).links.loss(hosts, share)
    print_text(f"{','.join(hosts)} loses {100 * share:.4g}% of all packets")


@command.command(context_settings={"ignore_unknown_options": True})
@click.argument("host")
@click.argument("words", nargs=-1, required=True, type=click.UNPROCESSED, metavar="-- COMMAND")
@STATE_DIR
def run(host: str, words: tuple[str, ...], state_dir: Path) -> None:
    """Run COMMAND on a node or on head, in its network and under its name; the exit status is the command's."""
    cluster = LocalCluster.load(state_dir)
    command_line = [*cluster.command_prefix(host), *words]
    os.execvpe(command_line[0], command_line, os.environ | cluster.env())


@command.command("power-off")
@click.argument("node")
@STATE_DIR
def power_off(node: str, state_dir: Path) -> None:
    """Kill everything that runs on NODE at once, as a power failure would."""
    victims = LocalCluster.load(state_dir).power_off(node)
    print_text(f"{node} is off: {len(victims)} process{'es' if len(victims) != 1 else ''} killed")


@command.command("power-on")
@click.argument("node")
@STATE_DIR
def power_on(node: str, state_dir: Path) -> None:
    """Start NODE again. If Slurm set it down, or never noticed that it was gone, it stays down until it is resumed."""
    LocalCluster.load(state_dir).power_on(node)
    print_text(f"{node} is on")
