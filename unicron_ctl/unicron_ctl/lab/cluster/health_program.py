"""Admission checks on a local cluster: HealthCheckProgram and the prolog, with a configuration for each node."""

from __future__ import annotations

import shlex
from pathlib import Path

from unicron_ctl.lab.cluster import shipped
from unicron_ctl.lab.cluster.cluster_layout import Layout
from unicron_ctl.shared.settings.places import nodes_python

HEALTH, PROLOG = shipped.health_program(), shipped.prolog()


def health_conf(folder: Path, layout: Layout, controller: str = "", **more: str) -> str:
    """Return the text of health.conf for the cluster's nodes."""
    keys = {
        "UNICRON_PYTHON": nodes_python(),
        "UNICRON_CONTROLLER": controller,
        "UNICRON_LOG": str(folder / "health.log"),
        "UNICRON_HEALTH_STATE": str(folder / "health-state"),
        "SLURM_CONF": str(layout.slurm_conf),
        "MUNGE_SOCKET": str(layout.munge_socket),
    }
    return "".join(f"{key}={value}\n" for key, value in (keys | more).items())


def wrapper(folder: Path, script: Path, variable: str) -> Path:
    """Write a program for slurm.conf that calls `script`. It sets `variable` to SCRIPT-NODE.conf in `folder` if that
    exists, and else to SCRIPT.conf: slurmd passes no variable of ours, and all virtual nodes share /etc."""
    name = script.parent.name.removesuffix(".d")
    path = folder / name
    own, usual = f'{shlex.quote(str(folder))}/{name}-"$SLURMD_NODENAME".conf', shlex.quote(f"{path}.conf")
    path.write_text(
        f'#!/bin/sh\n{variable}={own}\n[ -r "${variable}" ] || {variable}={usual}\nexport {variable}\n'
        f"exec {shlex.quote(str(script))}\n"
    )
    path.chmod(0o755)
    return path


def health_lines(folder: Path, layout: Layout, controller: str = "", interval: int = 60) -> list[str]:
    """Return lines for slurm.conf (``LocalCluster(config_lines=...)``), and write the files that they name."""
    (folder / "health.conf").write_text(health_conf(folder, layout, controller))
    program = wrapper(folder, HEALTH, "UNICRON_HEALTH_CONF")
    return [f"HealthCheckProgram={program}", f"HealthCheckInterval={interval}", "HealthCheckNodeState=ANY,CYCLE"]
