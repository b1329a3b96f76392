"""The kernel log as a stream of faults: records of /dev/kmsg (or of a file or FIFO that somebody fills) that the
severity table knows, each burst once.

Formats: Linux Documentation/ABI/testing/dev-kmsg ("6,339,5140900,-;text"), and plain lines as dmesg and syslog write.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from dataclasses import dataclass

from unicron_detector.failures.classify import Classifier
from unicron_detector.failures.severity import REPORT, Verdict

KMSG = "/dev/kmsg"
RECORD_BYTES = 8192  # the kernel's own limit for one record
LINES_PER_READ = 200  # a flood is read in portions; what the kernel's buffer loses meanwhile is counted
TEXT_KEPT = 500
BURST_SECONDS = 10.0  # the same fault within it is one burst
LONGEST_BURST = 300.0  # a burst that does not stop is reported again after this
KINDS_KEPT = 200
PER_MINUTE = 30  # different faults a minute that are forwarded
_RECORD = re.compile(rb"^\d+,\d+,\d+,[^;]*;")
_ESCAPE = re.compile(r"\\x([0-9a-fA-F]{2})")
_XID = re.compile(r"Xid\s{0,9}(?:\(([^)\n]{0,120})\))?:?\s{0,9}(\d{1,9})", re.IGNORECASE)
_PID = re.compile(
    r"\bpid[= ]'?(\d+)|[Kk]ill(?:ed)? process (\d+)|\btask .{1,40}?:(\d{1,9}) blocked|\[(\d+)\]: segfault"
)
_KILL = re.compile(r"\bkill(ed)? process \d+", re.IGNORECASE)
_NUMBERS = re.compile(r"0x[0-9a-f]+|\d+", re.IGNORECASE)


class KernelLog:
    """New lines of the kernel log. Raises OSError if it cannot be opened."""

    def __init__(self, path: str = KMSG) -> None:
        self.path, self.lost = path, 0
        mode = os.stat(path).st_mode
        self._device = stat.S_ISCHR(mode)
        self.pollable = not stat.S_ISREG(mode)
        """Whether its descriptor becomes readable with a new line. A plain file has to be polled by clock."""
        # Opened for writing, too, a FIFO never ends when its writer goes away.
        flags = os.O_RDWR if stat.S_ISFIFO(mode) else os.O_RDONLY
        self._file = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC)
        self._partial = b""
        if not stat.S_ISFIFO(mode):
            try:
                os.lseek(self._file, 0, os.SEEK_END)
            except OSError:
                os.close(self._file)
                raise

    def fileno(self) -> int:
        return self._file

    def close(self) -> None:
        os.close(self._file)

    def read(self) -> list[str]:
        """Return new lines, at most LINES_PER_READ of them; the rest comes with the next call. Raises OSError."""
        return self._records() if self._device else self._lines()

    def _records(self) -> list[str]:
        lines: list[str] = []
        while len(lines) < LINES_PER_READ:
            try:
                record = os.read(self._file, RECORD_BYTES)
            except BlockingIOError:
                break
            except OSError as error:
                if error.errno != errno.EPIPE:
                    raise
                self.lost += 1  # the kernel overwrote what was not read in time; the next read goes on behind it
                continue
            if not record:
                self.pollable = False  # it has an end, as /dev/null: always "readable", and never with anything
                break
            lines.append(line_of(record))
        return [line for line in lines if line]

    def _lines(self) -> list[str]:
        if not self.pollable:
            self._follow()
        try:
            data = os.read(self._file, RECORD_BYTES * 4)
        except BlockingIOError:
            return []
        *lines, self._partial = (self._partial + data).split(b"\n")
        if len(self._partial) > RECORD_BYTES:
            self._partial = b""
        return [line for line in map(line_of, lines) if line]

    def _follow(self) -> None:
        try:
            there, here = os.stat(self.path), os.fstat(self._file)
        except OSError:
            return  # between the rotation's two steps
        if (there.st_dev, there.st_ino) != (here.st_dev, here.st_ino):
            fresh = os.open(self.path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            os.close(self._file)
            self._file, self._partial = fresh, b""
        elif here.st_size < os.lseek(self._file, 0, os.SEEK_CUR):
            os.lseek(self._file, 0, os.SEEK_SET)
            self._partial = b""


def line_of(record: bytes) -> str:
    """Return the text of a kmsg record or of a plain line."""
    prefix = _RECORD.match(record)
    first = (record[prefix.end() :] if prefix else record).split(b"\n", 1)[0]
    text = first.decode(errors="replace").strip()
    if prefix:
        text = _ESCAPE.sub(lambda hit: chr(int(hit.group(1), 16)), text)
    return " ".join(text.split())[:TEXT_KEPT]


@dataclass(frozen=True)
class KernelFault:
    """A line that the table knows."""

    text: str
    code: str  # "xid 79" or the rule's id
    verdict: Verdict
    count: int = 1  # lines since the last report


class KernelFaults:
    """Turns lines into faults: those of the severity table, each burst once, at most PER_MINUTE of them a minute."""

    def __init__(self, classifier: Classifier) -> None:
        self._classifier = classifier
        self._for_kernels = {rule.id for rule in classifier.table.rules if "kernel" in rule.only_from}
        self._bursts: dict[tuple[str, str, int | None], list[float]] = {}
        """Kind of line -> [last line, last report, lines since]."""
        self._reported: list[float] = []

    def read_line(self, line: str, now: float) -> KernelFault | None:
        """Return the fault to report, or None. `now` in seconds of any clock that does not go back."""
        verdict = self._classifier.match(line, "kernel")
        if verdict is None or verdict.cause == "no_fault":
            return None
        if not (verdict.rule in self._for_kernels or of_a_kernel(verdict, line)):
            return None
        xid = _XID.search(line)
        code = f"xid {xid.group(2)}" if xid else verdict.rule
        kind = (code, (xid.group(1) or "") if xid else _NUMBERS.sub("#", line), pid_in(line))
        last, reported, lines = self._bursts.get(kind, [-BURST_SECONDS, -LONGEST_BURST, 0])
        goes_on = now - last < BURST_SECONDS and now - reported < LONGEST_BURST
        if goes_on or not self._is_within_rate(now):
            self._bursts[kind] = [now, reported, lines + 1]
            return None
        self._bursts[kind] = [now, now, 0]
        if len(self._bursts) > KINDS_KEPT:
            del self._bursts[min(self._bursts, key=lambda each: self._bursts[each][0])]
        return KernelFault(line, code, verdict, int(lines) + 1)

    def _is_within_rate(self, now: float) -> bool:
        self._reported = [at for at in self._reported if now - at < 60.0]
        if len(self._reported) >= PER_MINUTE:
            return False
        self._reported.append(now)
        return True


def of_a_kernel(verdict: Verdict, line: str) -> bool:
    """Whether a kernel speaks of hardware, networks, file systems or processes that it ended. Words of applications in
    its log (audit records, daemons that write there) say nothing about the node. Of the lines about an out-of-memory
    kill only the one that names the process counts."""
    if verdict.rule.startswith("xid"):
        return True
    if verdict.cause == "host_out_of_memory":
        return _KILL.search(line) is not None
    return verdict.scope != "application" and (verdict.action != REPORT or verdict.cause == "hardware_warning")


def pid_in(line: str) -> int | None:
    """Return the process that a kernel line names, in the node's own numbers; None if it names none."""
    hit = _PID.search(line)
    return int(next(group for group in hit.groups() if group)) if hit else None


def why_not(error: OSError, path: str) -> str:
    """Describe in one line why the kernel log is not read, and what to do about it."""
    if error.errno in (errno.EPERM, errno.EACCES):
        hint = "sysctl kernel.dmesg_restrict=0, or name a file that root fills in UNICRON_KMSG or [agent] kmsg"
    else:
        hint = "name another file in UNICRON_KMSG or [agent] kmsg"
    return f"the kernel log is not watched: {path}: {error.strerror}; {hint}"
