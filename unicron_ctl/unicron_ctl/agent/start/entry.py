"""The entry of the `unicron-agent` program. It imports nothing that might be missing or not fit, so that the command
runs all the same."""

from __future__ import annotations

import os
import sys

# What unicron-launch puts in front of the names of the user's PYTHON... variables, and the agent's own folder in front
# of those of the LD_... ones (slurm_plugin/spank/set_aside.h).
SET_ASIDE = "_UNICRON_USERS_"
LOCALE = "LC_CTYPE"  # which a Python sets for itself where no locale is given (PEP 538)


def restore_variables() -> None:
    """The user's PYTHON... variables are for the command and its ranks; this Python has begun without them. The locale
    that this Python has set is its own."""
    for name in [name for name in os.environ if name.startswith(SET_ASIDE)]:
        os.environ[name[len(SET_ASIDE) :]] = os.environ.pop(name)
    if LOCALE in os.environ and not was_given(LOCALE):
        del os.environ[LOCALE]


def was_given(name: str) -> bool:
    """Whether the variable was there when this process began; where there is no /proc, it was."""
    try:
        with open("/proc/self/environ", "rb") as file:
            return any(entry.startswith(f"{name}=".encode()) for entry in file.read().split(b"\0"))
    except OSError:
        return True


def main() -> None:
    """Entry point of the `unicron-agent` program."""
    restore_variables()
    try:
        from unicron_ctl.agent.connections.step_tasks import others

        others.adopt(os.environ)
        from unicron_ctl.agent.start.agent_main import main as program
        from unicron_detector.formats import LAUNCH

        refusal = LAUNCH.refusal(int(others.launcher)) if others.launcher else ""
    except (Exception, SystemExit) as error:  # a module that is not ours may have its name
        from unicron_ctl.agent.start.bare import without_agent

        without_agent(sys.argv[1:], f"{type(error).__name__}: {error}")
    if refusal:
        from unicron_ctl.agent.start.bare import without_agent

        without_agent(sys.argv[1:], f"it was installed with another plugin: {refusal}")
    program()


if __name__ == "__main__":
    main()
