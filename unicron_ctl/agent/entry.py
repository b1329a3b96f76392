"""Where the `unicron-agent` program begins. Nothing is imported here that might be missing or not fit: the command runs
all the same."""

from __future__ import annotations

import sys


def main() -> None:
    """Entry point of the `unicron-agent` program."""
    try:
        from unicron_ctl.agent.main import main as program
    except Exception as error:
        from unicron_ctl.agent.bare import without_agent

        without_agent(sys.argv[1:], f"{type(error).__name__}: {error}")
    program()


if __name__ == "__main__":
    main()
