"""Runs the click command of a program: every error is one line, and the exit status says of what kind it is."""

from __future__ import annotations

import errno
import os
import select
import sys
import traceback
from collections.abc import Callable, Sequence

import click

from unicron_ctl.shared.system.errors import FAILURE, WRONG_USE, UserError, one_line
from unicron_ctl.shared.system.printable import print_text


def tell_people(program: str, text: str) -> None:
    """Write one line on standard error."""
    print_text(f"{program}: {text}", err=True)


def run(
    program: str,
    command: click.Command,
    arguments: Sequence[str] | None = None,
    tell: Callable[[str, str], None] = tell_people,
) -> int:
    """Run a click command and return its exit status: 0, 2 for wrong use, 1 for anything else. `tell` writes every
    error as one line; with UNICRON_DEBUG=1 a traceback comes before it."""

    def report(message: str, status: int) -> int:
        if os.environ.get("UNICRON_DEBUG") == "1":
            traceback.print_exc()
        tell(program, one_line(message))
        return status

    try:
        result = command.main(args=arguments, prog_name=program, standalone_mode=False)
        return result if isinstance(result, int) else 0
    except click.UsageError as error:
        path = error.ctx.command_path if error.ctx else program
        return report(f"{error.format_message()} (see '{path} --help')", WRONG_USE)
    except click.ClickException as error:
        return report(error.format_message(), FAILURE)
    except UserError as error:
        return report(str(error), error.exit_code)
    except (click.Abort, KeyboardInterrupt):
        return report("interrupted", FAILURE)
    except OSError as error:
        return report(str(error), FAILURE)
    except SystemExit as leaving:  # click is silent about any broken pipe, not only that of `unicronctl events | head`
        if leaving.code and not _reader_is_gone():
            return report(os.strerror(errno.EPIPE), FAILURE)
        raise
    except Exception as error:
        hint = "this is a defect; run again with UNICRON_DEBUG=1 for the traceback"
        return report(f"{type(error).__name__}: {error} ({hint})", FAILURE)


def _reader_is_gone() -> bool:
    """Say whether nobody reads standard output any more."""
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)
    return any(found & (select.POLLERR | select.POLLHUP) for _, found in poll.poll(0))
