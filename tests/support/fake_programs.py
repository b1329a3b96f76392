"""Programs of a test's own in place of real ones."""

from __future__ import annotations

from pathlib import Path

from unicron_ctl.shared.slurm.command_line import CommandLineClient


def program(path: Path, text: str, shell: str = "sh") -> Path:
    """A script of a shell, which everybody may run."""
    path.write_text(f"#!/bin/{shell}\n{text}\n")
    path.chmod(0o755)
    return path


def slurm_in(folder: Path, timeout: float = 10.0, **programs: str) -> CommandLineClient:
    """A client whose Slurm is the programs in a folder. programs: written there before, by name."""
    for name, text in programs.items():
        program(folder / name, text)
    return CommandLineClient(env={"PATH": f"{folder}:/usr/bin:/bin"}, timeout=timeout)
