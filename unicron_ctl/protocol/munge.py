"""Who is speaking: munge credentials (docs/design/trust.md). Without munge on the machine the credential is empty."""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess

TIME_LIMIT = 3.0  # seconds for one call of munge or unmunge


def _arguments() -> list[str]:
    socket = os.environ.get("MUNGE_SOCKET")
    return ["--socket", socket] if socket else []


def make_credential() -> str:
    """A credential of this process's user, or "" where munge is not to be had."""
    program = shutil.which("munge")
    if program is None:
        return ""
    try:
        done = subprocess.run(
            [program, *_arguments(), "--no-input"], capture_output=True, text=True, timeout=TIME_LIMIT, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def unmunge(credential: str) -> str:
    """The user name in a munge credential, empty when it is not valid (or was used before)."""
    program = shutil.which("unmunge")
    if program is None or not credential:
        return ""
    command = [program, *_arguments(), "--no-output", "--metadata=-", "--keys=UID", "--numeric"]
    try:
        done = subprocess.run(
            command, input=credential, capture_output=True, text=True, timeout=TIME_LIMIT, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    words = done.stdout.split()
    if done.returncode != 0 or len(words) < 2 or not words[-1].isdigit():
        return ""
    try:
        return pwd.getpwuid(int(words[-1])).pw_name
    except KeyError:
        return words[-1]
