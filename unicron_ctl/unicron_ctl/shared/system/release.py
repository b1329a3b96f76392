"""The installed release. Its number stands only in `setup.cfg`, where the plugin's Makefile reads it, too."""

from __future__ import annotations

import functools
import re
from os.path import abspath, dirname  # each start pays for pathlib
from typing import Any

import click

import unicron
import unicron_detector
import unicron_transition
from unicron_ctl.shared.system.printable import print_text

DISTRIBUTION = "unicron-slurm"
UNKNOWN = "0+unknown"  # for a copy that is not installed
OF_RANKS = (unicron, unicron_transition, unicron_detector)  # the packages that ranks import


@functools.cache
def release() -> str:
    """Return the release of this program, such as "0.2.0"."""
    from importlib import metadata  # slow to import, wanted by few

    try:
        return metadata.version(DISTRIBUTION)
    except metadata.PackageNotFoundError:
        return UNKNOWN


def rank_roots() -> list[str]:
    """Return the folders that ranks need on their path; none if every Python program finds the packages installed."""
    roots = dict.fromkeys(dirname(dirname(abspath(str(package.__file__)))) for package in OF_RANKS)
    return [root for root in roots if not root.endswith("-packages")]


def work_together(one: str, other: str) -> bool:
    """Say whether two releases work together: they are at most one minor version apart (docs/upgrade.md)."""
    found = [re.match(r"(\d+)\.(\d+)", text) for text in (one, other)]
    numbers = [(int(each[1]), int(each[2])) for each in found if each]
    if len(numbers) < 2:
        return one == other
    return numbers[0][0] == numbers[1][0] and abs(numbers[0][1] - numbers[1][1]) <= 1


def _show(ctx: click.Context, _param: click.Parameter, value: bool) -> None:
    if value and not ctx.resilient_parsing:
        print_text(f"{ctx.find_root().info_name} {release()}")
        ctx.exit()


def version_option(command: Any) -> Any:
    """Add `--version` to a click command: it prints the program's name and release."""
    shown = click.option(
        "--version", is_flag=True, is_eager=True, expose_value=False, callback=_show, help="Show the version."
    )
    return shown(command)
