"""Runs the site's program that switches a node off, as programs of health checks are run."""

from __future__ import annotations

import subprocess
from collections.abc import Callable

from unicron_ctl.shared.settings.power_off import command_of, power_off_unfit
from unicron_ctl.shared.slurm.slurm_client import MOST_CHARACTERS, SlurmError
from unicron_ctl.shared.system.errors import one_line, shorten
from unicron_ctl.shared.system.printable import printable
from unicron_detector.health.program_output import TooMuchOutput
from unicron_detector.health.programs import run

POWER_OFF_SECONDS = 30.0  # for the program to end
ERRORS = 4096  # bytes of its last output that are read
THE_PROGRAM = "the program of power_off"


def switch_off(
    power_off: str, node: str, seconds: float = POWER_OFF_SECONDS, stops: Callable[[], bool] = lambda: False
) -> None:
    """Run the program for the node. Raises SlurmError if it can't be run, fails, prints too much or takes too long:
    then it is killed with all its children, and what became of the node's power is unknown.

    stops: unicrond is about to end, and so must the program.
    """
    if why := power_off_unfit(power_off, node):
        raise SlurmError(why)
    try:
        status, out = run(command_of(power_off, node), "", seconds, leaves=True, stops=stops)
    except subprocess.TimeoutExpired:
        why = "was killed, because unicrond ends" if stops() else f"did not end within {seconds:g} s and was killed"
        raise SlurmError(f"{THE_PROGRAM} {why}") from None
    except TooMuchOutput as error:
        raise SlurmError(f"{THE_PROGRAM}: {error} and was killed") from None
    except OSError as error:
        raise SlurmError(f"{THE_PROGRAM} cannot be run: {error}") from None
    if status:
        said = printable(one_line(out[-ERRORS:].decode(errors="replace")))
        text = f"{THE_PROGRAM} ended with status {status}{': ' * bool(said)}{said}"
        raise SlurmError(shorten(text, MOST_CHARACTERS))
