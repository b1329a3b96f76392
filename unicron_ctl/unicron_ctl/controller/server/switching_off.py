"""Runs the site's program that switches a node off."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile

from unicron_ctl.shared.settings.power_off import command_of, power_off_unfit
from unicron_ctl.shared.slurm.slurm_client import MOST_CHARACTERS, SlurmError
from unicron_ctl.shared.system.errors import one_line, shorten
from unicron_ctl.shared.system.printable import printable

POWER_OFF_SECONDS = 30.0  # for the program to end
ERRORS = 4096  # bytes of its last errors that are read


def switch_off(power_off: str, node: str, seconds: float = POWER_OFF_SECONDS) -> None:
    """Run the program for the node. Raises SlurmError if it can't be run, fails, or takes too long: then it is killed
    with all its children, and what became of the node's power is unknown."""
    if why := power_off_unfit(power_off):
        raise SlurmError(why)
    with tempfile.TemporaryFile() as errors:  # no pipe, which a child in the background would keep open
        try:
            process = subprocess.Popen(
                command_of(power_off, node),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=errors,
                cwd="/",
                start_new_session=True,
            )
        except OSError as error:
            raise SlurmError(f"the program of power_off cannot be run: {error}") from None
        with process:
            try:
                status = process.wait(seconds)
            except subprocess.TimeoutExpired:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                raise SlurmError(f"the program of power_off did not end within {seconds:g} s and was killed") from None
        if status:
            size = errors.seek(0, os.SEEK_END)
            errors.seek(max(0, size - ERRORS))
            said = printable(one_line(errors.read().decode(errors="replace")))
            text = f"the program of power_off ended with status {status}{': ' * bool(said)}{said}"
            raise SlurmError(shorten(text, MOST_CHARACTERS))
