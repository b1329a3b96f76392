"""Finds the parts for Slurm's side: in the checkout, or else where the packages put them (docs/install.md)."""

from __future__ import annotations

import sysconfig
from pathlib import Path

from unicron_ctl.shared.settings.places import CHECKOUT, PACKAGE_FOLDER, PACKAGED_AGENT

SIDE = CHECKOUT / "slurm_plugin"


def _first(checkout: str, packaged: str) -> Path:
    own = SIDE / checkout
    there = Path(PACKAGE_FOLDER, packaged)
    return there if there.is_file() and not SIDE.is_dir() else own


def plugin() -> Path:
    """Return the path of the SPANK plugin, which may have to be built."""
    return _first("spank/unicron.so", "unicron.so")


def health_program() -> Path:
    """Return the script for HealthCheckProgram."""
    return _first("health/unicron-health", "unicron-health")


def prolog() -> Path:
    """Return the script for Prolog."""
    return _first("prolog.d/50-unicron", "prolog.d/50-unicron")


def agent() -> Path:
    """Return the agent of this environment, or else the packaged one."""
    own = Path(sysconfig.get_path("scripts")) / "unicron-agent"
    there = Path(PACKAGED_AGENT)
    return there if there.is_file() and not own.is_file() else own
