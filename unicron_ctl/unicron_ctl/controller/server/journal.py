"""Messages of unicrond on standard error, by the standard `logging`.

Lines have the format of all logs (:mod:`unicron_detector.processes.log_format`). Under systemd the priority is before
it, as sd-daemon(3) has it, so that `journalctl -p warning` works. One message is one line without control characters,
for it may quote a job; a traceback follows in lines of its own.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Mapping
from datetime import datetime
from typing import TextIO

from unicron_ctl.shared.system.errors import one_line
from unicron_ctl.shared.system.printable import printable
from unicron_ctl.shared.system.program import tell_people
from unicron_detector.processes.log_format import log_line

ROOT = "unicron"  # the loggers are called unicron.controller and so on
LEVELS = ("debug", "info", "warning", "error")
_PRIORITIES = (  # syslog(3)
    (logging.CRITICAL, 2),
    (logging.ERROR, 3),
    (logging.WARNING, 4),
    (logging.INFO, 6),
)
_DEBUG = 7


class Formatter(logging.Formatter):
    """See the head of this file."""

    def __init__(self, program: str, journal: bool) -> None:
        super().__init__()
        self._program, self._journal = program, journal

    def format(self, record: logging.LogRecord) -> str:
        lines = [one_line(record.getMessage())]
        if record.exc_info:
            lines += self.formatException(record.exc_info).splitlines()
        start = mark(record.levelno) if self._journal else ""
        level, at, about = record.levelname, record.created, getattr(record, "about", {})
        return "\n".join(start + printable(log_line(level, self._program, line, at, **about)) for line in lines)


class JsonFormatter(Formatter):
    """An object a line: time (ISO 8601), level, program, job, node and event where there is one, text, traceback."""

    def format(self, record: logging.LogRecord) -> str:
        told = {
            "time": datetime.fromtimestamp(record.created).astimezone().isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "program": self._program,
            **{name: value for name, value in getattr(record, "about", {}).items() if value},
            "text": one_line(record.getMessage()),
        }
        if record.exc_info:
            told["traceback"] = self.formatException(record.exc_info)
        return (mark(record.levelno) if self._journal else "") + json.dumps(told)


FORMATS: dict[str, type[Formatter]] = {"text": Formatter, "json": JsonFormatter}


class Handler(logging.StreamHandler[TextIO]):
    """A standard error that cannot be written must not end the controller, nor be complained about there."""

    def handleError(self, record: logging.LogRecord) -> None:
        pass


def start(program: str, level: str = "info", stream: TextIO | None = None, form: str = "text") -> None:
    """From now on the loggers below "unicron" write to `stream`, by default standard error, from `level` on. form: one
    of FORMATS."""
    target = sys.stderr if stream is None else stream
    handler = Handler(target)
    handler.setFormatter(FORMATS[form](program, is_journal(target)))
    logger = logging.getLogger(ROOT)
    logger.handlers[:] = [handler]
    logger.setLevel(level.upper())
    logger.propagate = False


def tell_error(program: str, text: str) -> None:
    """Writes why the program ends, in the format of `start`."""
    if _is_json():
        logging.getLogger(ROOT).error("%s", text)
    else:
        tell_people((mark(logging.ERROR) if is_journal(sys.stderr) else "") + program, text)


def announce(program: str, text: str) -> None:
    """Writes what whoever started the program waits for: on standard output, or as an object with the others."""
    if _is_json():
        logging.getLogger(ROOT).info("%s", text)
    else:
        print(f"{program}: {text}", flush=True)


def _is_json() -> bool:
    return any(isinstance(handler.formatter, JsonFormatter) for handler in logging.getLogger(ROOT).handlers)


def is_journal(stream: TextIO, environment: Mapping[str, str] = os.environ) -> bool:
    """Whether the stream goes to the journal: JOURNAL_STREAM names the device and inode of what systemd connected, and
    is inherited by programs whose standard error was redirected since."""
    device, _, inode = environment.get("JOURNAL_STREAM", "").partition(":")
    try:
        status = os.fstat(stream.fileno())
    except (OSError, ValueError):
        return False
    return (device, inode) == (str(status.st_dev), str(status.st_ino))


def mark(level: int) -> str:
    """Return the mark with which a line of this level begins in the journal."""
    return f"<{next((priority for least, priority in _PRIORITIES if level >= least), _DEBUG)}>"
