"""How the three programs run a click command: every error is one line, and the exit status says what kind it is."""

from __future__ import annotations

import errno
import os
import select
import sys
import traceback
from collections.abc import Sequence

import click

from unicron.ctl.system.errors import FAILURE, WRONG_USE, UserError, one_line
from unicron.ctl.system.printable import print_text


def run(program: str, command: click.Command, arguments: Sequence[str] | None = None, mark: str = "") -> int:
    """Runs a click command and returns its exit status: 0, 2 for wrong use, 1 for anything else.

    Every error becomes one line on stderr, which begins with `mark`. With UNICRON_DEBUG=1 a traceback comes before it.
    """
    try:
        result = command.main(args=arguments, prog_name=program, standalone_mode=False)
        return result if isinstance(result, int) else 0
    except click.UsageError as error:
        path = error.ctx.command_path if error.ctx else program
        return _report(mark + program, f"{error.format_message()} (see '{path} --help')", WRONG_USE)
    except click.ClickException as error:
        return _report(mark + program, error.format_message(), FAILURE)
    except UserError as error:
        return _report(mark + program, str(error), error.exit_code)
    except (click.Abort, KeyboardInterrupt):
        return _report(mark + program, "interrupted", FAILURE)
    except OSError as error:
        return _report(mark + program, str(error), FAILURE)
    except SystemExit as leaving:  # click's, without a word, for whichever pipe is broken (`unicronctl events | head`)
        if leaving.code and not _reader_is_gone():
            return _report(mark + program, os.strerror(errno.EPIPE), FAILURE)
        raise
    except Exception as error:
        hint = "this is a defect; run again with UNICRON_DEBUG=1 for the traceback"
        return _report(mark + program, f"{type(error).__name__}: {error} ({hint})", FAILURE)


def _reader_is_gone() -> bool:
    """Whether nobody reads standard output any more, so that another pipe is not taken for it."""
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)
    return any(found & (select.POLLERR | select.POLLHUP) for _, found in poll.poll(0))


def _report(program: str, message: str, status: int) -> int:
    if os.environ.get("UNICRON_DEBUG") == "1":
        traceback.print_exc()
    print_text(f"{program}: {one_line(message)}", err=True)
    return status
