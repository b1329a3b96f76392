"""The `unicron-agent` program: `unicron-agent run -- COMMAND...` in front of a training command."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

import click

from unicron_ctl.agent.place import Place, read_place
from unicron_ctl.errors import UserError

REGISTER_TIMEOUT = 10.0  # seconds to find the controller before the job runs unprotected


def hidden_packages(command: Sequence[str], folder: str) -> list[Path]:
    """Files of the user's which would be imported in place of unicron's packages: beside the script (its folder leads
    sys.path)."""
    script = next((Path(folder, word) for word in command[1:] if word.endswith(".py")), None)
    beside = script.resolve().parent if script is not None else Path(folder).resolve()
    own = Path(__file__).resolve().parent.parent.parent
    if beside == own:
        return []
    names = ("detector", "transition")
    return [
        path
        for name in names
        for path in (beside / f"{name}.py", beside / name)
        if path.is_file() or (path / "__init__.py").is_file()
    ]


def check_command(command: Sequence[str]) -> None:
    """Raises UserError for a command that cannot work."""
    if not command:
        raise UserError("no command: write `unicron-agent run -- python train.py ...`", 2)
    hidden = hidden_packages(command, os.getcwd())
    if hidden:
        raise UserError(
            f"{hidden[0]} hides unicron's package '{hidden[0].stem}': rename it, or run with --no-unicron", 2
        )


def run_unprotected(place: Place, command: Sequence[str], why: str) -> None:
    """Become the user's command, in the plain world that Slurm's own view of the job gives. Never returns."""
    from unicron_ctl.agent.static_world import static_environment

    print(f"unicron: {place.label} on {place.node}: {why}; the job runs unprotected", file=sys.stderr, flush=True)
    environment = {**os.environ, **static_environment(place)}
    try:
        os.execvpe(command[0], list(command), environment)
    except OSError as error:
        raise UserError(f"couldn't start {command[0]}: {error.strerror}", 1) from None


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def cli() -> None:
    """Supervise the ranks of one node."""


@cli.command(context_settings={"ignore_unknown_options": True})
@click.option(
    "--controller", metavar="ADDRESS", help="tcp://HOST:PORT; default UNICRON_CONTROLLER, then the configuration."
)
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
def run(controller: str | None, command: tuple[str, ...]) -> None:
    """Run COMMAND once per rank of this node, protected."""
    check_command(command)
    place = read_place()
    address = controller or os.environ.get("UNICRON_CONTROLLER")
    if not address:
        run_unprotected(place, command, "no controller is configured (UNICRON_CONTROLLER)")
    from unicron_ctl.agent.agent import Agent

    agent = Agent(place, command, address)
    if not agent.connect(float(os.environ.get("UNICRON_REGISTER_TIMEOUT", REGISTER_TIMEOUT))):
        agent.close()
        run_unprotected(place, command, f"no controller answers at {address}")
    sys.exit(agent.run())


def main() -> None:
    """Entry point: errors are one line."""
    try:
        cli(standalone_mode=False)
    except click.ClickException as error:
        print(f"unicron-agent: {error.format_message()}", file=sys.stderr)
        sys.exit(2)
    except UserError as error:
        print(f"unicron: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except click.Abort:
        sys.exit(130)


if __name__ == "__main__":
    main()
