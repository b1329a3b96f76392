"""`unicronctl setup`: asks Slurm, writes unicron.toml, and says what else to do."""

from __future__ import annotations

import contextlib
import os
import re
import socket
from pathlib import Path

import click

from unicron_ctl.doctor.first_file import Wish, unicron_toml
from unicron_ctl.doctor.host_facts import read_config
from unicron_ctl.doctor.plugstack import candidates, installed_agent, installed_plugin, plugin_facts
from unicron_ctl.doctor.reach_checks import uid_of
from unicron_ctl.doctor.setting_up import UNIT_USER, Site, plugstack_conf, slurm_conf_lines, steps
from unicron_ctl.shared.settings.config import DEFAULT_PORT, address_problem
from unicron_ctl.shared.slurm import CommandLineClient, SlurmError
from unicron_ctl.shared.slurm.slurm_settings import SlurmSettings
from unicron_ctl.shared.slurm.steps import search_path
from unicron_ctl.shared.system.errors import PROBLEM_FOUND, WRONG_USE, UserError
from unicron_ctl.shared.system.printable import print_text
from unicron_ctl.shared.system.whole_file import write_whole

USUAL = "/etc/unicron/unicron.toml"
OLD_SUFFIX = ".old"
USER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.@-]*", re.ASCII)


@click.command(name="setup")
@click.option("--config", "path", default=USUAL, show_default=True, type=click.Path(dir_okay=False), help="The file.")
@click.option("--host", metavar="HOST", help="Where unicrond is to run [default: slurmctld's host].")
@click.option("--user", default=UNIT_USER, show_default=True, metavar="USER", help="unicrond's user.")
@click.option(
    "--partition", "marked", multiple=True, metavar="P", help="Begin in P only; may be repeated [default: all]."
)
@click.option("--dry-run", is_flag=True, help="Write nothing, and print the files.")
@click.option("--force", is_flag=True, help=f"Replace files that differ; they stay beside, as FILE{OLD_SUFFIX}.")
def command(path: str, host: str | None, user: str, marked: tuple[str, ...], dry_run: bool, force: bool) -> int:
    """Write unicron.toml for this cluster, in mode observe, and the plugin's line, and print what else to do.

    A file that is there and differs is left alone. Nothing is changed in Slurm. The exit status is 3 if a file that is
    left alone has a mistake.
    """
    client = CommandLineClient(env={"PATH": search_path()["PATH"]})
    settings = client.settings()
    wish = _wish(client, settings, host, user, marked)
    print_text(_write(Path(path), unicron_toml(wish), dry_run, force), lines=True)
    site, problems = _site(client, settings, wish, user, path)
    print_text(_write(Path(site.plugstack), plugstack_conf(site), dry_run, force), lines=True)
    _print_rest(site)
    for problem in problems:
        print_text(f"{path}: {problem}", err=True)
    return PROBLEM_FOUND if problems else 0


def _wish(
    client: CommandLineClient, settings: SlurmSettings, host: str | None, user: str, marked: tuple[str, ...]
) -> Wish:
    """Return the contents of unicron.toml. Raises UserError."""
    nodes, partitions = client.nodes(), [one.name for one in client.partitions()]
    if odd := [name for name in marked if name not in partitions]:
        raise UserError(f"Slurm has no partition {odd[0]}: it has {', '.join(partitions)}", WRONG_USE)
    host = host or next(iter(settings.head_hosts()), "") or socket.gethostname()
    # Slurm counts a slice of a GPU (MIG: gpu:1g.5gb:7) as a GPU, and the driver does not.
    gpus = {0 if "." in node.gres else node.gpus for node in nodes}
    host = f"[{host}]" if ":" in host and not host.startswith("[") else host
    if address_problem(f"tcp://{host}:{DEFAULT_PORT}"):
        raise UserError(f"{host!r} is no host's name: name the host as all nodes know it, with --host", WRONG_USE)
    if not USER.fullmatch(user):
        raise UserError(f"{user!r} is no user's name: name unicrond's user with --user", WRONG_USE)
    return Wish(
        host=host,
        user="" if user in ("root", settings.user()[0]) else user,
        partitions=tuple(partitions),
        marked=marked,
        gpus=next(iter(gpus)) if len(gpus) == 1 and gpus != {0} else None,
    )


def _site(
    client: CommandLineClient, settings: SlurmSettings, wish: Wish, user: str, path: str
) -> tuple[Site, list[str]]:
    """Return the facts that lines and steps depend on, and the problems of the present file."""
    facts = read_config(path)[1] if os.path.isfile(path) else None
    conf = os.environ.get("SLURM_CONF") or settings.text("SLURM_CONF")
    plugstacks = candidates(settings.text("PlugStackConfig"), conf, settings.text("SlurmdSpoolDir"))
    has_accounts, level = "slurmdbd" in settings.text("AccountingStorageType"), ""
    if has_accounts:
        with contextlib.suppress(SlurmError):
            level = client.admin_level(user)
    site = Site(
        settings=settings,
        address=(facts.address if facts else "") or wish.address,
        config=path,
        plugstack=os.path.join(os.path.dirname(path), "plugstack.conf"),
        user=user,
        uid=uid_of(user),
        level=level,
        has_accounts=has_accounts,
        plugin=installed_plugin(settings.text("PluginDir")),
        agent=installed_agent(),
        found=plugin_facts(plugstacks, settings.text("PluginDir"))[0],
    )
    return site, facts.problems if facts else []


def _write(path: Path, text: str, dry_run: bool, force: bool) -> str:
    """Write the file, unless another is there. Return what was done. Raises UserError."""
    try:
        old = path.read_text()
    except FileNotFoundError:
        old = None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read ({error}): name another file with --config") from None
    if old == text:
        return f"{path} is there already, and as it is to be"
    if old is not None and not force:
        shown = f"\n{text}" if dry_run else ""
        advice = "it stays; --force would replace it" if dry_run else "it was left alone; --force replaces it"
        return f"{path} is there and differs: {advice}{shown}"
    if dry_run:
        return f"would write {path}:\n\n{text}"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if old is not None:
            write_whole(path.with_name(path.name + OLD_SUFFIX), old)
        write_whole(path, text)
    except OSError as error:
        raise UserError(
            f"cannot write {path} ({error.strerror}): run this as root, or name a file with --config, or use --dry-run"
        ) from None
    return f"wrote {path}"


def _print_rest(site: Site) -> None:
    if lines := slurm_conf_lines(site.settings):
        print_text("\n---- slurm.conf: add these lines, or change what is there\n" + "\n".join(lines), lines=True)
    else:
        print_text("\n---- slurm.conf has all that is needed", lines=True)
    if site.found and site.found.line:
        print_text(f"\n---- plugstack.conf has the plugin already\n{site.found.line}", lines=True)
    print_text("\n---- then, in this order", lines=True)
    for place, step in enumerate(steps(site), 1):
        print_text(f"{place}. {step}", lines=True)
