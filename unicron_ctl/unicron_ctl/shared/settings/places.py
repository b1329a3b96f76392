"""Finds Unicron's programs, the controller's state folder and its address."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

import unicron
from unicron_ctl.shared.settings.config import ALL_ADDRESSES, Config
from unicron_ctl.shared.settings.config_file import load

# Where the packages put their parts (docs/install.md)
PACKAGE_FOLDER = "/usr/lib/unicron"
PACKAGED_PLUGIN = f"{PACKAGE_FOLDER}/unicron.so"
PACKAGED_AGENT, PACKAGED_PYTHON = "/opt/unicron/bin/unicron-agent", "/opt/unicron/bin/python"
PACKAGED_PROGRAMS = "/usr/bin"
CHECKOUT = Path(unicron.__file__).resolve().parents[2]  # an installation may have none
_INSTALLED_TEMPLATES = Path(unicron.__file__).parent / "sbatch_templates"
TEMPLATES = _INSTALLED_TEMPLATES if _INSTALLED_TEMPLATES.is_dir() else CHECKOUT / "sbatch_templates"


def state_dir(config: Config, environment: Mapping[str, str] = os.environ) -> Path:
    """Return the controller's state folder: as configured, or /var/lib/unicron for root, or below the user's home."""
    if config.controller.state_dir:
        return Path(config.controller.state_dir).expanduser()
    if os.geteuid() == 0:
        return Path("/var/lib/unicron")
    home = environment.get("XDG_STATE_HOME") or str(Path(environment.get("HOME", "/tmp")) / ".local" / "state")
    return Path(home) / "unicron"


def controller_address(
    explicit: str | None = None, config: Config | None = None, environment: Mapping[str, str] = os.environ
) -> str:
    """Return the controller's address for clients: the option, UNICRON_CONTROLLER, the configuration's `address`, the
    file of a controller that runs here, or the configuration's `listen`, with this host in place of all addresses.
    Several addresses have commas between them."""
    if explicit:
        return explicit
    if environment.get("UNICRON_CONTROLLER"):
        return environment["UNICRON_CONTROLLER"]
    config = config or load(environment=environment)
    if config.controller.addresses:
        return ",".join(config.controller.addresses)
    try:
        written = (state_dir(config, environment) / "address").read_text().strip()
    except OSError:
        written = ""
    host, _, port = config.controller.listen.removeprefix("tcp://").rpartition(":")
    return written or f"tcp://{'127.0.0.1' if host in ALL_ADDRESSES else host}:{port}"


def is_guess(
    explicit: str | None = None, config: Config | None = None, environment: Mapping[str, str] = os.environ
) -> bool:
    """Whether `controller_address` can only guess that the controller runs on this host."""
    config = config or load(environment=environment)
    return (
        not (explicit or environment.get("UNICRON_CONTROLLER") or config.controller.addresses)
        and not os.path.isfile(state_dir(config, environment) / "address")
        and config.controller.listen.removeprefix("tcp://").rpartition(":")[0] in ALL_ADDRESSES
    )


def is_packaged() -> bool:
    """Whether this program comes from the packages."""
    return unicron.__file__.startswith(f"{PACKAGE_FOLDER}/")


def nodes_python() -> str:
    """Return the Python that has Unicron on all nodes: this one, or the agent's for a program of the packages."""
    return PACKAGED_PYTHON if is_packaged() else sys.executable


def program(name: str, module: str) -> list[str]:
    """Return the command of another program of this installation: from the packages, or this Python with its module."""
    return [f"{PACKAGED_PROGRAMS}/{name}"] if is_packaged() else [sys.executable, "-m", module]
