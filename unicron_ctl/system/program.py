"""How the three programs run a click command: every error is one line, and the exit status says what kind it is."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Sequence

import click

from unicron.ctl.system.errors import FAILURE, WRONG_USE, UserError, one_line


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
    except BrokenPipeError:
        # The reader went away (`unicronctl events | head`). Python would complain again at exit when it flushes.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILURE
    except OSError as error:
        return _report(mark + program, str(error), FAILURE)
    except Exception as error:
        hint = "this is a defect; run again with UNICRON_DEBUG=1 for the traceback"
        return _report(mark + program, f"{type(error).__name__}: {error} ({hint})", FAILURE)


def _report(program: str, message: str, status: int) -> int:
    if os.environ.get("UNICRON_DEBUG") == "1":
        traceback.print_exc()
    click.echo(f"{program}: {one_line(message)}", err=True)
    return status
