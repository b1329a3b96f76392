"""Sets up unicrond's log on standard error, by the standard `logging`.

Lines have the format of all logs (:mod:`unicron_detector.processes.log_format`). Under systemd they begin with their
priority (sd-daemon(3)), so that `journalctl -p warning` works. A message may quote a job, so it becomes one line
without control characters; a traceback follows in further lines.
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
_PRIORITIES = {logging.CRITICAL: 2, logging.ERROR: 3, logging.WARNING: 4, logging.INFO: 6}  # syslog(3)


class Formatter(logging.Formatter):
    """Writes a record as text, in the format that the module's docstring describes."""

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
    """Writes a record as a JSON object: time (ISO 8601), level, program, text, and job, node, event and traceback if it
    has them."""

    def format(self, record: logging.LogRecord) -> str:
        fields = {
            "time": datetime.fromtimestamp(record.created).astimezone().isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "program": self._program,
            **{name: value for name, value in getattr(record, "about", {}).items() if value},
            "text": one_line(record.getMessage()),
        }
        if record.exc_info:
            fields["traceback"] = self.formatException(record.exc_info)
        return (mark(record.levelno) if self._journal else "") + json.dumps(fields)


FORMATS: dict[str, type[Formatter]] = {"text": Formatter, "json": JsonFormatter}


class Handler(logging.StreamHandler[TextIO]):
    """Ignores a standard error that cannot be written."""

    def handleError(self, record: logging.LogRecord) -> None:
        pass


def start(program: str, level: str = "info", stream: TextIO | None = None, form: str = "text") -> None:
    """Make the loggers below "unicron" write to `stream`, by default standard error, from `level` on. form: one of
    FORMATS."""
    target = sys.stderr if stream is None else stream
    handler = Handler(target)
    handler.setFormatter(FORMATS[form](program, is_journal(target)))
    logger = logging.getLogger(ROOT)
    logger.handlers[:] = [handler]
    logger.setLevel(level.upper())
    logger.propagate = False


def tell_error(program: str, text: str) -> None:
    """Write the reason why the program ends, in the format of `start`."""
    if _is_json():
        logging.getLogger(ROOT).error("%s", text)
    else:
        tell_people((mark(logging.ERROR) if is_journal(sys.stderr) else "") + program, text)


def announce(program: str, text: str) -> None:
    """Write the line for which the caller of the program waits: on standard output, or as JSON in the log."""
    if _is_json():
        logging.getLogger(ROOT).info("%s", text)
    else:
        print(f"{program}: {text}", flush=True)


def _is_json() -> bool:
    return any(isinstance(handler.formatter, JsonFormatter) for handler in logging.getLogger(ROOT).handlers)


def is_journal(stream: TextIO, environment: Mapping[str, str] = os.environ) -> bool:
    """Whether the stream goes to the journal. JOURNAL_STREAM names the device and inode that systemd connected;
    programs inherit it even if their standard error is redirected."""
    device, _, inode = environment.get("JOURNAL_STREAM", "").partition(":")
    try:
        status = os.fstat(stream.fileno())
    except (OSError, ValueError):
        return False
    return (device, inode) == (str(status.st_dev), str(status.st_ino))


def mark(level: int) -> str:
    """Return the mark with which a line of this level begins in the journal."""
    return f"<{next((priority for least, priority in _PRIORITIES.items() if level >= least), 7)}>"
