"""`unicronctl ping`: whether the controller answers."""

from __future__ import annotations

import time

import click

from unicron_ctl.shared.commands.options import Number, controller_option
from unicron_ctl.shared.protocol.client import ask_and_see
from unicron_ctl.shared.settings.config_file import load
from unicron_ctl.shared.settings.places import controller_address
from unicron_ctl.shared.system.addresses import name_of
from unicron_ctl.shared.system.printable import print_text


@click.command(name="ping")
@click.option("--seconds", type=Number(0.1, 600), default=5.0, show_default=True, help="How long to wait.")
@controller_option()
def command(seconds: float, controller: str | None) -> None:
    """Ask the controller for a sign of life, and say which host has it. The exit status is 0 if it gives one."""
    began = time.monotonic()
    _, target = ask_and_see({"kind": "ping"}, controller, timeout=seconds)
    took = time.monotonic() - began
    print_text(f"{name_of(controller_address(controller, load()), target)} answers after {1e3 * took:.1f} ms")
