"""Finds the programs of Slurm and munge, and names the Debian packages of missing ones."""

from __future__ import annotations

import re
import shutil
import subprocess

from unicron_ctl.shared.slurm.steps import search_path
from unicron_ctl.shared.system.errors import UserError

SEARCH_PATH = search_path()["PATH"]
PACKAGE_OF = {
    "slurmctld": "slurmctld",
    "slurmd": "slurmd",
    "scontrol": "slurm-client",
    "sinfo": "slurm-client",
    "squeue": "slurm-client",
    "munged": "munge",
    "sacctmgr": "slurm-client",
    "slurmdbd": "slurmdbd",
    "mariadbd": "mariadb-server-core",
    "mariadb-install-db": "mariadb-server-core",
    "ip": "iproute2",
    "nft": "nftables",
    "nsenter": "util-linux",
    "unshare": "util-linux",
    "hostname": "hostname",
}


def locate(names: list[str]) -> dict[str, str]:
    """Return the absolute path of each program. Raises UserError with the apt line if one is missing."""
    found = {name: shutil.which(name, path=SEARCH_PATH) for name in names}
    missing = [name for name, path in found.items() if path is None]
    if missing:
        packages = sorted({PACKAGE_OF.get(name, name) for name in missing})
        raise UserError(f"{', '.join(missing)} not found; install with: apt-get install {' '.join(packages)}")
    return {name: path for name, path in found.items() if path is not None}


def slurm_version(slurmctld: str) -> tuple[int, int]:
    """Return the major release of a slurmctld program, such as (22, 5)."""
    text = subprocess.run([slurmctld, "-V"], capture_output=True, text=True, timeout=10).stdout
    match = re.search(r"(\d+)\.(\d+)", text)
    if match is None:
        raise UserError(f"{slurmctld} -V does not print a version: {text.strip()!r}")
    return int(match[1]), int(match[2])
