"""`unicronctl backup` and `restore`: copy unicrond's state folder into a file and back, on unicrond's host."""

from __future__ import annotations

from pathlib import Path

import click

from unicron_ctl.shared.commands.times import moment
from unicron_ctl.shared.log import state_copies
from unicron_ctl.shared.settings.config_file import load
from unicron_ctl.shared.settings.places import state_dir
from unicron_ctl.shared.system.printable import print_text
from unicron_detector.words import plural

STATE_OPTION = click.option(
    "--state-dir", "state", type=click.Path(path_type=Path), help="unicrond's state folder [default: configuration]."
)


@click.command(name="backup")
@click.argument("file", type=click.Path(path_type=Path))
@STATE_OPTION
def command(file: Path, state: Path | None) -> None:
    """Copy unicrond's log and key into FILE, on its host.

    unicrond may run. FILE holds the secret key: only you can read it. It is read again before this ends.
    """
    found = state_copies.backup(state or state_dir(load()), file)
    key = "and the key" if found.key else "no key (auth = none)"
    print_text(
        f"{file}: {plural(found.events, 'event')} up to {found.last} of {_clock(found.at)}, {key}; read again: sound"
    )


@click.command(name="restore")
@click.argument("file", type=click.Path(path_type=Path, exists=True, dir_okay=False))
@STATE_OPTION
def restore(file: Path, state: Path | None) -> None:
    """Put the copy in FILE into unicrond's state folder.

    No unicrond may run on the folder. What is in it now is kept beside. After the start nothing in Slurm is changed
    until `unicronctl resume`; jobs heal on their own nodes.
    """
    folder = state or state_dir(load())
    found, kept = state_copies.restore(file, folder)
    print_text(f"{folder}: {plural(found.events, 'event')} up to {_clock(found.at)}")
    if kept is not None:
        print_text(f"what was there is in {kept}")
    print_text("start unicrond, look at `unicronctl status` and `unicronctl nodes`, then `unicronctl resume`")


def _clock(at: float) -> str:
    return moment(at) if at else "no time"
