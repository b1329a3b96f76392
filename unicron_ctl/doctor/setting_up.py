"""What else an installation takes: the plugin's line, slurm.conf's, and the steps in their order. Pure."""

from __future__ import annotations

import glob
import os
import shutil
import sysconfig
from dataclasses import dataclass

from unicron.ctl.doctor.facts import PluginFacts
from unicron.ctl.doctor.slurm_lines import HEALTH_PROGRAM, HOOK_FOLDER, HOOK_SOURCE, missing
from unicron.ctl.slurm.slurm_settings import SlurmSettings

PLUGSTACK_FOLDER = "plugstack.conf.d"
LINK = "zz-unicron.conf"
SHIPPED_LINE = "/etc/unicron/plugstack.conf"
USUAL_PLUGIN = "/usr/local/lib/slurm/unicron.so"
USUAL_AGENT = "/opt/unicron/bin/unicron-agent"
UNIT_USER = "unicron"  # of slurm_plugin/systemd/unicrond.service
ADMINISTRATOR = "Administrator"


@dataclass(frozen=True)
class Site:
    """What the steps depend on. address: the controller's. config: the path of unicron.toml. user: unicrond's; uid: its
    number here, None while there is none. level: its AdminLevel. has_accounts: Slurm has slurmdbd. plugin, agent: the
    paths to write into the plugin's line. found: the plugin as it is on this host. restricted: dmesg_restrict is 1."""

    settings: SlurmSettings
    address: str
    config: str
    user: str
    uid: int | None = None
    level: str = ""
    has_accounts: bool = False
    plugin: str = USUAL_PLUGIN
    agent: str = USUAL_AGENT
    found: PluginFacts | None = None
    restricted: bool = False
    is_configless: bool = False


def plugin_path(plugin_dir: str) -> str:
    """Where unicron.so is on this host, or where `make install` puts it."""
    places = [os.path.join(plugin_dir, "unicron.so")] if plugin_dir else []
    places += [USUAL_PLUGIN, *sorted(glob.glob("/usr/lib*/**/slurm*/unicron.so", recursive=False))]
    return next((path for path in places if os.path.isfile(path)), USUAL_PLUGIN)


def agent_path() -> str:
    """The agent of this environment, or the place of the agent's own folder."""
    beside = os.path.join(sysconfig.get_path("scripts"), "unicron-agent")
    return beside if os.path.isfile(beside) else shutil.which("unicron-agent") or USUAL_AGENT


def plugstack_line(site: Site) -> str:
    """The plugin's line."""
    return f"optional {site.plugin} agent={site.agent} controller={site.address} config={site.config} default=off"


def slurm_conf_lines(settings: SlurmSettings) -> list[str]:
    """The lines to add to slurm.conf or to change there, each below its reason."""
    return [text for wanted, line in missing(settings) for text in (f"# {wanted.why}", line)]


def steps(site: Site) -> list[str]:
    """What to do, in order. A step may have several lines; those that begin with spaces are commands."""
    return [
        *_user(site),
        *_files(site),
        *_controller(site),
        *_plugin(site),
        *_hooks(site),
        *_slurm(site),
        "Look whether all is well:\n    unicronctl doctor --all",
        "Watch what Unicron would do. It heals jobs that ask for it (sbatch --unicron) on their own nodes, and changes "
        'nothing in Slurm until a partition has mode = "act":\n    unicronctl status\n    unicronctl events -f',
    ]


def _user(site: Site) -> list[str]:
    found = []
    if site.uid is None:
        found.append(
            f"Make the user {site.user}, with one number on all hosts:\n"
            f"    useradd --system --uid NUMBER --shell /usr/sbin/nologin {site.user}"
        )
    if site.has_accounts and site.level != ADMINISTRATOR and site.user not in ("root", site.settings.user()[0]):
        verb = "modify user where name=" if site.level else "add user "
        rest = f" set adminlevel={ADMINISTRATOR}" if site.level else f" account=root adminlevel={ADMINISTRATOR}"
        found.append(f"Let {site.user} change nodes (an operator may not):\n    sacctmgr {verb}{site.user}{rest}")
    return found


def _files(site: Site) -> list[str]:
    text = (
        f"Copy {site.config} to all hosts, and install Unicron there at the same path ({os.path.dirname(site.agent)})"
    )
    if site.is_configless:
        text += ". Slurm sends its own files to the nodes, and not this one"
    return [text + "."]


def _controller(site: Site) -> list[str]:
    port = site.address.rpartition(":")[2]
    own = (
        "" if site.user == UNIT_USER else f"    with User={site.user} and Group={site.user} (systemctl edit unicrond)\n"
    )
    return [
        f"Start the controller on {site.address.removeprefix('tcp://').rpartition(':')[0]}, and open port {port} there "
        f"for TCP and UDP, and the nodes' TCP ports 32768 to 60999 (net.ipv4.ip_local_port_range) to it:\n"
        f"    install -m 644 slurm_plugin/systemd/unicrond.service /etc/systemd/system/\n{own}"
        f"    systemctl daemon-reload && systemctl enable --now unicrond\n"
        f"    unicronctl ping"
    ]


def _plugin(site: Site) -> list[str]:
    folder = os.path.join(os.path.dirname(site.settings.text("PlugStackConfig") or "/etc/slurm/x"), PLUGSTACK_FOLDER)
    if site.found is not None and site.found.line and site.found.is_there:
        return []
    return [
        f"Install the plugin on login and compute nodes, put its line (above) into {SHIPPED_LINE}, and enable it. "
        f"plugstack.conf must have `include {folder}/*`:\n"
        f"    make -C slurm_plugin/spank install\n"
        f"    ln -s {SHIPPED_LINE} {folder}/{LINK}"
    ]


def _hooks(site: Site) -> list[str]:
    links = [
        f"    install -D -m 755 {HOOK_SOURCE[name]} {HOOK_FOLDER[name]}/50-unicron" for name in sorted(HOOK_FOLDER)
    ]
    own = [name for name in sorted(HOOK_FOLDER) if any(HOOK_FOLDER[name] not in w for w in site.settings.words(name))]
    text = "Install the scripts on all compute nodes. With UNICRON_HEALTH_DRAIN=off they report and drain nothing:\n"
    text += "\n".join(links)
    text += f"\n    install -m 755 slurm_plugin/health/unicron-health {HEALTH_PROGRAM}"
    text += f"\n    printf 'UNICRON_PYTHON=%s\\nUNICRON_HEALTH_DRAIN=off\\n' {os.path.dirname(site.agent)}/python"
    text += " > /etc/unicron/health.conf\n    echo UNICRON_CHECK_HEALTH=warn > /etc/unicron/prolog.conf"
    if own:
        text += f"\n    (Slurm has a {' and an '.join(own)} of its own: let it call Unicron's)"
    found = [text]
    if site.restricted:
        found.append(
            "Let agents read the kernel log, on all compute nodes:\n"
            "    echo kernel.dmesg_restrict=0 > /etc/sysctl.d/50-unicron.conf && sysctl --system"
        )
    return found


def _slurm(site: Site) -> list[str]:
    if not missing(site.settings):
        return []
    return ["Add the lines above to slurm.conf, and let Slurm read it:\n    scontrol reconfigure"]
