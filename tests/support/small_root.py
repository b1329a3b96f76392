"""A small root, as a container has one: a shell, and nothing of Unicron's, of Python's or of the site's."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
from collections.abc import Sequence
from pathlib import Path

SOURCE = Path(__file__).with_name("container_plugin.c")
FOLDERS = ("bin", "dev", "proc", "tmp")


def make_root(root: Path) -> Path:
    """A root in which there is a shell, under the name of a program that nobody knows, too, and slurmstepd, by which
    Slurm starts task prologs (from 23.11 on)."""
    shell, stepd = Path("/bin/sh").resolve(), shutil.which("slurmstepd", path=f"{os.environ['PATH']}:/usr/sbin")
    programs = [shell] if stepd is None else [shell, Path(stepd)]
    linked = subprocess.run(["ldd", *programs], capture_output=True, text=True, check=True).stdout.split()
    for path in (*programs, *(Path(word) for word in linked if word.startswith("/") and not word.endswith(":"))):
        add(root, path)
    for name in FOLDERS:
        (root / name).mkdir(exist_ok=True)
    (root / "tmp").chmod(0o1777)
    if not (root / "dev" / "null").exists():
        os.mknod(root / "dev" / "null", 0o666 | stat.S_IFCHR, os.makedev(1, 3))  # Slurm's own prologs open it
    if not (root / "bin" / "sh").exists():
        (root / "bin" / "sh").symlink_to(shell)
        (root / "bin" / "program").symlink_to(shell)
    return root


def add(root: Path, path: Path) -> None:
    """The file, at its own path."""
    (root / path.relative_to("/")).parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(path, root / path.relative_to("/"))


def plugin_line(plugin: Path, root: Path, mounted: Sequence[Path | str] = ()) -> str:
    """The line of plugstack.conf with which tasks have this root, and these folders in it. It builds the plugin."""
    subprocess.run(["cc", "-shared", "-fPIC", "-o", plugin, SOURCE], check=True)
    for path in mounted:
        (root / str(path).lstrip("/")).mkdir(parents=True, exist_ok=True)
    return " ".join(map(str, ("required", plugin, root, *mounted)))
