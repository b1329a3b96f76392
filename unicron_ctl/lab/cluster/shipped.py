"""Where the parts of Slurm's side are: in the checkout, else where the packages have put them (docs/install.md)."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import unicron

CHECKOUT = Path(unicron.__file__).resolve().parent.parent / "slurm_plugin"
PACKAGED = Path("/usr/lib/unicron")
PACKAGED_AGENT = Path("/opt/unicron/bin/unicron-agent")


def _first(checkout: str, packaged: str) -> Path:
    own = CHECKOUT / checkout
    there = PACKAGED / packaged
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
    return own if own.is_file() or not PACKAGED_AGENT.is_file() else PACKAGED_AGENT
