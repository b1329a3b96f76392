"""Where the parts of Slurm's side are: in the checkout, else where the packages have put them (docs/install.md)."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import unicron
from unicron.ctl.settings.places import PACKAGED, PACKAGED_AGENT

CHECKOUT = Path(unicron.__file__).resolve().parent.parent / "slurm_plugin"


def _first(checkout: str, packaged: str) -> Path:
    own = CHECKOUT / checkout
    there = Path(PACKAGED, packaged)
    return there if there.is_file() and not CHECKOUT.is_dir() else own


def plugin() -> Path:
    """The SPANK plugin, built or to be built."""
    return _first("spank/unicron.so", "unicron.so")


def health_program() -> Path:
    """The script for HealthCheckProgram."""
    return _first("health/unicron-health", "unicron-health")


def prolog() -> Path:
    """The script for Prolog."""
    return _first("prolog.d/50-unicron", "prolog.d/50-unicron")


def agent() -> Path:
    """The agent of this environment, else the packaged one."""
    own = Path(sysconfig.get_path("scripts")) / "unicron-agent"
    there = Path(PACKAGED_AGENT)
    return there if there.is_file() and not own.is_file() else own
