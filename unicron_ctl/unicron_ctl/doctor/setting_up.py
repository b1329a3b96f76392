"""Makes the plugin's line, the lines for slurm.conf, and the steps of an installation in order. Pure."""

from __future__ import annotations

import os
from dataclasses import dataclass

from unicron_ctl.doctor.facts import PluginFacts
from unicron_ctl.doctor.slurm_lines import ADMINISTRATOR, HOOK_FOLDER, administrator, missing
from unicron_ctl.shared.settings.places import PACKAGED_AGENT, PACKAGED_PLUGIN
from unicron_ctl.shared.slurm.slurm_settings import SlurmSettings
from unicron_ctl.shared.system.addresses import split_addresses

PLUGSTACK_FOLDER = "plugstack.conf.d"
LINK = "zz-unicron.conf"
UNIT_USER = "unicron"  # of slurm_plugin/systemd/unicrond.service
PLUGSTACK_HEAD = """\
# Unicron's SPANK plugin. A link to this file enables it: see `unicronctl setup` and unicron-plugin(8).
# "optional": if unicron.so is missing or outdated, jobs lose their protection and go on.
"""


@dataclass(frozen=True)
class Site:
    """The facts about a site that the lines and steps depend on."""

    settings: SlurmSettings
    address: str
    """The controller's address."""
    config: str
    """Unicron's configuration file."""
    plugstack: str
    """The file with the plugin's line, in Unicron's folder."""
    user: str
    """unicrond's user."""
    uid: int | None = None
    """The user's number on this host; None if there is no such user."""
    level: str = ""
    """The user's AdminLevel in Slurm."""
    has_accounts: bool = False
    """Whether Slurm has slurmdbd."""
    plugin: str = PACKAGED_PLUGIN
    """The plugin's path, for its line."""
    agent: str = PACKAGED_AGENT
    """The agent's path, for the plugin's line."""
    found: PluginFacts | None = None
    """The plugin that Slurm has on this host."""

    @property
    def is_enabled(self) -> bool:
        """Whether Slurm's plugstack.conf names the plugin on this host."""
        return self.found is not None and bool(self.found.line)


def plugin_line(site: Site) -> str:
    """Return the plugin's line in plugstack.conf."""
    return f"optional {site.plugin} agent={site.agent} controller={site.address} config={site.config} default=off"


def plugstack_conf(site: Site) -> str:
    """Return the contents of the file to which a link in plugstack.conf.d leads."""
    return f"{PLUGSTACK_HEAD}{plugin_line(site)}\n"


def slurm_conf_lines(settings: SlurmSettings) -> list[str]:
    """Return the lines to add or change in slurm.conf, each below its reason."""
    return [text for wanted, line in missing(settings) for text in (f"# {wanted.why}", line)]


def steps(site: Site) -> list[str]:
    """Return the steps of the installation in order. Lines of a step that begin with spaces are commands."""
    return [*_controller(site), *_nodes(site), *_slurm(site), *_last_steps(site)]


def _controller(site: Site) -> list[str]:
    places = [one.removeprefix("tcp://").rpartition(":") for one in split_addresses(site.address)]
    host, port = " and ".join(place[0] for place in places), places[0][2]
    found = []
    if site.uid is None:
        found.append(
            f"Make the user {site.user}, with one number on all hosts:\n"
            f"    useradd --system --uid NUMBER --shell /usr/sbin/nologin {site.user}"
        )
    elif site.uid and site.user != site.settings.user()[0]:
        found.append(
            f"On all other hosts make the user {site.user} with the number that it has here:\n"
            f"    useradd --system --uid {site.uid} --shell /usr/sbin/nologin {site.user}"
        )
    own = "" if site.user == UNIT_USER else f"    systemctl edit unicrond    # [Service] User={site.user}\n"
    return [
        *found,
        f"Start the controller on {host}. Open port {port} there for TCP and UDP, and the nodes' TCP ports 32768 to "
        f"60999 (sysctl net.ipv4.ip_local_port_range) and slurmd's for that host:\n{own}"
        f"    systemctl enable --now unicrond\n    unicronctl ping",
    ]


def _nodes(site: Site) -> list[str]:
    folder = os.path.dirname(site.config)
    text = "Install unicron-plugin, unicron-client and unicron-agent on all login and compute nodes, and copy "
    configless = "enable_configless" in site.settings.words("SlurmctldParameters")
    text += f"{folder} there{' (Slurm, which is configless, does not send it)' if configless else ''}"
    if site.is_enabled:
        return [f"{text}."]
    links = os.path.join(os.path.dirname(site.settings.text("PlugStackConfig") or "/etc/slurm/x"), PLUGSTACK_FOLDER)
    return [
        f"{text}. A link enables the plugin; plugstack.conf must have `include {links}/*`:\n"
        f"    ln -s {site.plugstack} {links}/{LINK}"
    ]


def _slurm(site: Site) -> list[str]:
    if not missing(site.settings):
        return []
    folder = os.path.dirname(site.config)
    text = "Add the lines above to slurm.conf, and let Slurm read it. As the two files have it here, the checks only "
    text += "report at first; without UNICRON_HEALTH_DRAIN=off they drain nodes that are proven bad:\n"
    text += f"    echo UNICRON_HEALTH_DRAIN=off > {folder}/health.conf       # on all compute nodes\n"
    text += f"    echo UNICRON_CHECK_HEALTH=warn > {folder}/prolog.conf\n"
    text += "    scontrol reconfigure"
    own = [name for name, there in HOOK_FOLDER.items() if any(there not in w for w in site.settings.words(name))]
    if own:
        text += f"\n    # Slurm has a {' and an '.join(own)} of its own: let it call {HOOK_FOLDER[own[0]]}/50-unicron"
    return [text]


def _last_steps(site: Site) -> list[str]:
    found = [
        "See what is still missing:\n    unicronctl doctor --all",
        "Watch for a while. Jobs that ask for Unicron (sbatch --unicron) are healed on their own nodes, and nothing is "
        "changed in Slurm:\n    unicronctl status\n    unicronctl events -f",
    ]
    name = site.settings.user()[0] or "slurm"
    before = 'Before you set mode = "act" for a partition, let unicrond'
    if site.user in ("root", name) or site.level == ADMINISTRATOR:
        return found
    if not site.has_accounts:
        return [
            *found,
            f"{before} run as {name}: without slurmdbd only that user may change nodes:\n"
            f"    systemctl edit unicrond    # [Service] User={name}",
        ]
    return [*found, f"{before} change nodes (an operator may not):\n    {administrator(site.user, site.level)}"]
