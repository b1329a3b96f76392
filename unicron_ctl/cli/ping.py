"""`unicronctl ping`: whether the controller answers."""

from __future__ import annotations

import time

import click

from unicron.ctl.cli.options import controller_option
from unicron.ctl.protocol.client import ask_controller
from unicron.ctl.settings.config_file import load
from unicron.ctl.settings.places import controller_address
from unicron.ctl.system.printable import print_text


@click.command(name="ping")
@click.option("--seconds", type=click.FloatRange(0.1, 600), default=5.0, show_default=True, help="How long to wait.")
@controller_option()
def command(seconds: float, controller: str | None) -> None:
    """Ask the controller for a sign of life. The exit status is 0 if it gives one."""
    began = time.monotonic()
    ask_controller({"kind": "ping"}, controller, timeout=seconds)
    print_text(f"{controller_address(controller, load())} answers after {1e3 * (time.monotonic() - began):.1f} ms")
