"""The entry of the `unicron-agent` program. It imports only the standard library at first, so that the user's command
runs even if something is missing or does not fit."""

from __future__ import annotations

import os
import sys

# The prefix that unicron-launch puts before the names of the user's PYTHON... variables, and the agent's own folder
# before those of the LD_... ones (slurm_plugin/spank/set_aside.h)
SET_ASIDE = "_UNICRON_USERS_"
LOCALE = "LC_CTYPE"  # Python sets it where no locale is given (PEP 538)


def restore_variables() -> None:
    """Give the user's PYTHON... variables back to the command, and remove the locale that this Python has set."""
    for name in [name for name in os.environ if name.startswith(SET_ASIDE)]:
        os.environ[name[len(SET_ASIDE) :]] = os.environ.pop(name)
    if LOCALE in os.environ and not was_given(LOCALE):
        del os.environ[LOCALE]


def was_given(name: str) -> bool:
    """Say whether the variable was set when this process began; without /proc, yes."""
    try:
        with open("/proc/self/environ", "rb") as file:
            return any(entry.startswith(f"{name}=".encode()) for entry in file.read().split(b"\0"))
    except OSError:
        return True


def main() -> None:
    """Entry point of the `unicron-agent` program."""
    restore_variables()
    why = ""
    try:
        from unicron_ctl.agent.connections.step_tasks import others

        others.adopt(os.environ)
        from unicron_ctl.agent.start.agent_main import main as program
        from unicron_detector.formats import LAUNCH

        if others.launcher and (refusal := LAUNCH.refusal(int(others.launcher))):
            why = f"it was installed with another plugin: {refusal}"
    except (Exception, SystemExit) as error:  # another module may have the name of one of ours
        why = f"{type(error).__name__}: {error}"
    if why:
        from unicron_ctl.agent.start.bare import without_agent

        without_agent(sys.argv[1:], why)
    program()


if __name__ == "__main__":
    main()
