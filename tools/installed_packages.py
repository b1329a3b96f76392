"""Copies of the project and of installed packages, for what brings its own: the agent's folder (agent_folder.py) and
the system packages (packaging/stage.py)."""

from __future__ import annotations

import configparser
import importlib.metadata
import shutil
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TEMPLATES = "sbatch_templates"
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


def copy_project(target: Path, *left_out: str) -> None:
    """Copies the project's packages into one folder, as pip does. left_out: packages, and parts of any package."""
    ignored = shutil.ignore_patterns("__pycache__", *left_out)
    for package in sorted(path.parent for path in ROOT.glob("*/unicron*/__init__.py")):
        if package.name not in left_out:
            shutil.copytree(package, target / package.name, ignore=ignored)
    if TEMPLATES not in left_out:
        shutil.copytree(ROOT / TEMPLATES, target / "unicron" / TEMPLATES, ignore=ignored)


def write_release(folder: Path, distribution: str, release: str) -> None:
    """Writes by what the project in that folder knows its release and its rooms (importlib.metadata)."""
    about = folder / f"{distribution.replace('-', '_')}-{release}.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {release}\n")
    settings = configparser.ConfigParser()
    settings.read(ROOT / "setup.cfg")
    groups = (f"[{group}]\n{rows.strip()}\n" for group, rows in settings["options.entry_points"].items())
    (about / "entry_points.txt").write_text("\n".join(groups))
