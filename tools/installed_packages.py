"""Copies of installed packages, for what brings its own: the agent's folder (agent_folder.py) and the system packages
(packaging/stage.py)."""

from __future__ import annotations

import importlib.metadata
import shutil
from pathlib import Path

# What pip notes of its own work differs from one machine to the next.
OF_PIP = ("RECORD", "INSTALLER", "REQUESTED", "direct_url.json")


def copy_package(name: str, target: Path) -> None:
    """Copies a package of the running Python, without its programs and tests. Raises PackageNotFoundError."""
    for file in importlib.metadata.files(name) or ():
        if ".." in file.parts or "__pycache__" in file.parts or "tests" in file.parts or file.name in OF_PIP:
            continue
        there = target / file
        there.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(file.locate(), there)


def write_release(folder: Path, distribution: str, release: str) -> None:
    """Writes by what the project in that folder knows its release (importlib.metadata)."""
    about = folder / f"{distribution.replace('-', '_')}-{release}.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {release}\n")
