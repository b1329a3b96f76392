"""Parses the lines that a process wrote into statements, each with the weight that its writer gives it.

Writers label their lines (INFO, W, ERROR), a traceback ends with its exception, an abort names its reason after
`what():`, and the frames of a backtrace are names of functions. Rules of the severity table see the parsed lines.
Standard library only: ranks and agents use it.
"""

from __future__ import annotations

import contextlib
import enum
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from unicron_detector.failures.labels import (
    ASCEND,
    GLOG,
    HEADER,
    LEVEL,
    NCCL,
    PYTHON_WARNING,
    WARN,
    Weight,
    label,
)

MOST_LINES = 2000  # of a longer text the end is read
LONGEST_TEXT = 64 * 1024  # characters; of a longer text the head and the tail are read
LONGEST_LINE = 2000  # characters; likewise, and texts of libraries have some 500
MESSAGE_LINES = 12  # of one message


class Kind(enum.Enum):
    """The form of a statement."""

    LINE = "line"
    EXCEPTION = "exception"  # nothing caught it, as far as the log shows
    ABORT = "abort"  # of C++ or of a library: the process ends itself
    CRASH = "crash"  # ended by a signal or the allocator: how, not why
    LAUNCHER = "launcher"  # a parent's report of how its child ended


@dataclass
class Statement:
    """One statement."""

    text: str
    weight: Weight
    kind: Kind = Kind.LINE
    speaker: str = ""
    """The rank that a prefix names."""
    chained: bool = False
    """Whether it was raised from the exception before it, or while that was handled."""
    grouped: bool = False
    """Whether it is a part of an ExceptionGroup."""
    frames: list[str] = field(default_factory=list)
    """Files of its traceback."""


_COLOUR = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
# Prefixes of launchers: torch, torchrun (its role), mpirun, PRRTE, SageMaker, Ray, SkyPilot.
LAUNCHERS = (
    r"\[[A-Za-z_][\w.-]{0,60}\d\]: ?|\[[\w.-]{0,60}@?\d{1,9}(?:,[\w:,.-]{1,80})?\]<\w{1,9}>: ?|"
    r"\((?:\w{1,40}(?:, rank=\d{1,9})?,? )?pid=\d{1,9}[^)\n]{0,80}\) ?"
)
_PREFIX = re.compile(rf"({LAUNCHERS}| {{0,4}}\d{{1,5}}: (?=\S))")
# Prefixes of log collectors: a time, syslog's header, a container's or a replica's name.
_CLOCK = r"\d\d:\d\d:\d\d(?:[.,]\d{1,9})?(?:Z|[+-]\d\d:?\d\d)?"
_DAY = r"\d{4}[-/]\d\d[-/]\d\d"
COLLECTORS = (
    rf"(?:<\d{{1,3}}>1? ?)?[A-Z][a-z]{{2}} [ \d]\d {_CLOCK} (?:[\w.-]{{1,64}} [a-z][\w-]{{0,40}}(?:\[\d{{1,9}}\])?: )?|"
    rf"(?:<\d{{1,3}}>1? ?)?\[?(?:{_DAY}[T ])?{_CLOCK}\]?:? (?:std(?:out|err) [FP] |\|\|? |"
    r"(?:[\w.-]{1,64} )?[\w./-]{1,64}\[\d{1,9}\]: |[\w.-]{1,64} [\w./-]{1,64} \d{1,9} \S{1,40} - )?|"
    r"[^|\n]{0,60}\d{1,3}%\|[^|\n]{0,120}\| [^\[\n]{0,60}\[[^\]\n]{0,80}\] ?|"  # a progress bar
    r"[\w.-]{1,64} {0,40}\| |[\w.-]{1,64}/\d{1,6} |\[pod/[\w./-]{1,160}\] |\[\d{1,6}\] (?=[A-Z][a-z])|"
    r"\[rank=\d{1,6}\] (?:\|\| )?"
)
_COLLECTOR = re.compile(COLLECTORS)
_JSON = re.compile(r'\{.{0,300}?"(?:log|message|msg|data)": ?("(?:[^"\\]|\\.){0,2000}")')
_OF_A_STREAM = re.compile(r'"(?:stream|pipe|time|timestamp|ts|level|levelname|severity)": ?["\d]')
_HOST = re.compile(r"[A-Za-z][\w.-]{0,62}\d(?:-\w{1,20})?: ")
_GUTTER = re.compile(r"\s+[|+](?:[ -]|$)[-+ ]*")  # of an ExceptionGroup
_TRACEBACK = re.compile(r"( *)(?:traceback *: )?(?:Exception Group )?Traceback \(most recent call last\):")
_IGNORED_EXCEPTION = re.compile(r"Exception ignored (in|while|on)\b")
_IN_THREAD = re.compile(r"Exception in thread |Exception in callback |Task exception was never retrieved")
_CHAIN = re.compile(
    r"(?:The above exception was the direct cause of|During handling of the above exception, another exception)"
)
_EXCEPTION = re.compile(r"((?:[A-Za-z_]\w*(?:\.|::))*[A-Z]\w*)(?:: +|:?\s*$)")
_CLASS = re.compile(r"(?:Error|Exception|Exit|Interrupt|Timeout|Refused|Expired|Group|Unavailable|Failed)$")
_EXCEPTION_NAME = re.compile(r"[A-Za-z_][\w.]*(?::|$)")
_FRAME_BEGINS = re.compile(r'\s+File "[^"]+", line \d+, in ')
_TRACEBACK_LATER = re.compile(r".*(Traceback \(most recent call last\):)$")  # after a progress bar
# The text before a traceback's first line or its frames.
_STANDS_BEFORE = re.compile(
    r"(.{1,200}?)(?:(?:Exception Group )?Traceback \(most recent call last\):$|  File \"[^\"]+\", line \d+, in |"
    r"(?:torch\.[a-z.]{1,60}\.)?ChildFailedError: ?$|Root Cause \(first observed failure\):$)"
)
MOST_PREFIXES = 32  # of one text
_FRAME_FILE = re.compile(r'\s*File "([^"]+)", line \d+')
_TERMINATE = re.compile(r"terminate called|libc\+\+abi: terminating|pure virtual method called")
_WHAT = re.compile(r"\s*what\(\): ")
_ENDED_BY = re.compile(r"\bterminated with exception: |\bterminating with uncaught exception of type ")
_PANIC = re.compile(
    r"thread '[^']*' (?:\(\d+\) )?panicked at |^panic: |goroutine \d+ \[running\]|MPI_ABORT was invoked"
)
_CRASH = re.compile(
    r"Fatal Python error: |\*\*\* SIG[A-Z]+ |\[\S+:\d+\] Signal: |Segmentation fault\b|Bus error\b|"
    r"Aborted\b(?: \(core)?|"
    r"Illegal instruction\b|Floating point exception\b|Killed$|double free or corruption|corrupted (?:size|double)|"
    r"(?:free|munmap_chunk|(?:re|[mc])alloc|malloc_consolidate)\(\)|\*\*\* (?:stack smashing|buffer overflow) detected|"
    r"Trace/breakpoint trap|\*\*\* Error in |Caught signal \d+"
)
_LAUNCHER = re.compile(
    r"(?:[\w.]+\.)?(?:ChildFailedError|ProcessExitedException|ProcessRaisedException|CalledProcessError|"
    r"RayTaskError\S*|RayActorError|\w*(?:Died|Crashed)Error)\b|"
    r"(?:srun: error: \S+: tasks? [\d,-]+: )|(?:mpirun|mpiexec|prterun|orterun)\b.{0,40} noticed that|"
    r"Primary job +terminated|-+ Process \d+ terminated with"
)
# torchrun's report. It also names the ranks that it ended itself; the first failure that it saw is the reason.
_ROOT_CAUSE = "Root Cause (first observed failure):"
EXIT_REPORT = re.compile(r"Root Cause \(first observed failure\):.{0,300}?exitcode *: (-?\d{1,3})\b", re.DOTALL)
_FIELD = re.compile(r"\s{1,4}(time|host|rank|exitcode|error_file|traceback) *: ?(.*)")
_HOW_IT_ENDED = re.compile(r"-?\d{1,3} +\(pid: \d+\)|Signal (\d{1,2}) \(SIG\w+\) received by PID")
_OF_THE_REPORT = re.compile(
    rf"{_FIELD.pattern}|{re.escape(_ROOT_CAUSE)}$|\[\d+\]:$|Failures:$|\s+<NO_OTHER_FAILURES>$|\S{{1,200}} FAILED$"
)
_HINT = re.compile(
    r"(?:CUDA|HIP) kernel errors might|For debugging consider passing|Compile with `TORCH_USE|"
    r"Exception raised from |Device-side assertion tracking|note: run with `RUST|NOTE: |Search for `cuda|"
    r"Extension modules: |(?:Current thread|Thread) 0x[0-9a-f]+ |<no Python frame>|Python runtime state: |"
    r"Last error:\s*$|\*\*\* Check failure stack trace|\*\*\* End of error message|\*\*\* Process received signal|"
    r"\[\S+:\d+\] \*\*\* (?:Process received|End of error)|\[\S+:\d+\] (?:Failing at address|Signal code): |"
    r"Traceback: |Stack trace|Backtrace|"
    r"\s*(?:TraceBack \(most recent|Rectify the fault based on|Possible Cause: |Solution: )"  # CANN's
)
_FRAME = re.compile(
    r"frame #\d+: |\s*#\d+ +(?:0x|\S+ )|\s*@ +0x|PC: @ |\s+\d+:? +(?:0x[0-9a-f]+|/\S+)|\[0x[0-9a-f]+\]|\s+at \S+:\d+|"
    r"\s*\d+ +/\S+\(|\[[\w.-]+:\d+\] +\[ *\d+\]|=+ backtrace|={4,}|-{4,}|\*{4,}$|[0-9a-f]{6,}-[0-9a-f]{6,} [-r]|"
    r"\s*/(?=[^\s(]*\.so)[^\s(]*\([^\s)]*\) ?\[0x|\s+[~^][~^ ]*$|\s+<[^>]+>$|\s*\d+: 0x[0-9a-f]+|\s*\.\.\. \d+ more"
)


# Help texts list what may have happened; that is no evidence.
_ADVICE = re.compile(
    r"(?:There are (?:some|many|several) (?:potential|possible|reasons)|This (?:usually )?(?:is|could be|may be) "
    r"(?:usually )?"
    r"(?:caused by(?: a number|:)|due to either)|This error may occur when|Possible (?:causes|reasons)|"
    r"Common causes).*",
    re.DOTALL,
)


def exception(text: str) -> re.Match[str] | None:
    """Match an exception's type (group 1) at the beginning of a message."""
    return _EXCEPTION.match(text)


def bare_line(line: str) -> str:
    """Return one line without the prefixes of launchers and log collectors."""
    return _Line(line, _Prefixes(())).text


def is_information(line: str) -> bool:
    """Whether a line's own writer calls it information or a warning, and it is no exception that quotes one."""
    return label(line) is Weight.NOISE and not _raised(line)


def lines_outside_frames(text: str) -> Iterator[str]:
    """Yield the lines of a log, without those of tracebacks that show files and source: these say nothing alone."""
    prefixes, base = _Prefixes(()), -1
    for raw in text.splitlines():
        line = _Line(raw, prefixes)
        if _FRAME_FILE.match(line.text):
            base = line.indent
        elif base < 0 or (line.text.strip() and line.indent <= base):
            base = line.indent if PYTHON_WARNING.match(line.text) else -1  # it shows its source, too
            yield raw


def of_nccl(line: str) -> bool:
    """Whether NCCL or RCCL, which label all their lines, wrote this one."""
    return NCCL.search(line[:200]) is not None


def tells_of_no_end(text: str) -> bool:
    """Whether a log is labelled as information from its first line on, and nothing in it names an error or an end. A
    single line does not count, since it was forwarded because of an end."""
    lines = [_Line(raw, _Prefixes(())) for raw in text.splitlines() if raw.strip()]
    if len(lines) < 2 or exception(lines[0].text) or not is_information(lines[0].text):
        return False
    if any(_TRACEBACK.match(line.text) or _FRAME_BEGINS.match(line.text) for line in lines):
        return False
    return all(one.kind is Kind.LINE and one.weight <= Weight.PLAIN for one in statements(text))


def statements(text: str) -> list[Statement]:
    """Return the statements in the order of the text, without frames of backtraces and the like."""
    return list(_Reader(head_and_tail(text, LONGEST_TEXT).splitlines()[-MOST_LINES:]))


def head_and_tail(text: str, most: int) -> str:
    """Return the head and the tail of a text and of each of its lines, if these are longer than is read."""
    if len(text) > LONGEST_LINE:
        text = "\n".join(_halves(line, LONGEST_LINE) for line in text.split("\n"))
    return _halves(text, most)


def _halves(text: str, most: int) -> str:
    return text if len(text) <= most else text[: most // 2] + "\n" + text[-(most // 2) :]


class _Line:
    """A line without the additions of launchers, collectors and terminals."""

    __slots__ = ("grouped", "indent", "speaker", "text")

    def __init__(self, raw: str, known: _Prefixes) -> None:
        text, speaker = known.without(_plain(raw))
        while prefix := _PREFIX.match(text):
            speaker, text = prefix.group(1).strip(": "), text[prefix.end() :]
        gutter = _GUTTER.match(text)
        self.grouped = gutter is not None
        if gutter is not None:
            bare = text.lstrip(" |+-")
            text = text[len(re.match(r"\s+[|+]-?", text).group(0)) :].removeprefix(" ") if bare else ""  # type: ignore[union-attr]
            text = re.sub(r"^\+?-{4,}.*", "", text)
        if not _TRACEBACK.match(text) and not _FIELD.match(text) and (later := _TRACEBACK_LATER.match(text)):
            text = later.group(1)
        text = _without_header(_without_collectors(text))
        self.text, self.speaker = text, speaker
        self.indent = len(text) - len(text.lstrip())


def _plain(raw: str) -> str:
    """Return the line without colours, unpacked from a collector's JSON."""
    text = _COLOUR.sub("", raw).rstrip()
    if text.startswith("{") and (held := _JSON.match(text)) and _OF_A_STREAM.search(text):
        with contextlib.suppress(ValueError):
            said = str(json.loads(held.group(1))).rstrip()
            return said if not LEVEL.search(text[:200]) or said[:1] == " " or _is_end(said) else text
    return text


def _without_collectors(text: str) -> str:
    """Return the line without a collector's prefix. A logger's own header stays, since it has the label."""
    while (before := _COLLECTOR.match(text) or _PREFIX.match(text)) and label(text) is None:
        text = text[before.end() :]
    return text


def _without_header(text: str) -> str:
    """Remove a parent's header: its child's end is an end, whatever level the parent gives it."""
    if not (header := HEADER.match(text)) or label(text) is None:
        return text
    rest = text[header.end() :]
    while before := _PREFIX.match(rest) or _HOST.match(rest):
        rest = rest[before.end() :]
    relayed = len(rest) < len(text) - header.end()
    return rest if _CRASH.match(rest) or (relayed and _is_end(rest)) else text


def _is_end(text: str) -> bool:
    ends = (_TRACEBACK, _FRAME_BEGINS, _WHAT, _TERMINATE, _CRASH, _LAUNCHER, _OF_THE_REPORT)
    return any(each.match(text) for each in ends) or _raised(text) or _PANIC.search(text) is not None


class _Prefixes:
    """Prefixes of the tracebacks of a text. With other numbers they precede other lines, too."""

    def __init__(self, lines: Sequence[str]) -> None:
        shapes: dict[bool, dict[str, None]] = {False: {}, True: {}}
        for line in lines:
            found = _STANDS_BEFORE.match(_plain(line))
            before = re.sub(r"\s{1,4}traceback *:$", "", found.group(1).rstrip()) if found else ""
            if before.strip("|+- \t") and not GLOG.match(before + " ") and len(shapes[True]) < MOST_PREFIXES:
                labelled = label(before + " x") is not None
                shapes[labelled][re.sub(r"\d+", r"\\d{1,20}", re.escape(before))] = None
        self._plain, self._labelled = (
            re.compile(f"(?:{'|'.join(each)})[ \t]?") if (each := list(shapes[labelled])[:MOST_PREFIXES]) else None
            for labelled in (False, True)
        )

    def without(self, text: str) -> tuple[str, str]:
        """Return the line and its speaker. A prefix with a level is removed only within a traceback: a parent that logs
        its child's lines logs its own, too."""
        for prefixes, labelled in ((self._plain, False), (self._labelled, True)):
            if prefixes is not None and (before := prefixes.match(text)):
                rest = text[before.end() :]
                if not labelled or not rest.strip() or rest[0] == " " or _is_end(rest) or _CHAIN.match(rest):
                    return rest, re.sub(r"\d*[\d:.,-]*:\d\d[\d:.,]*Z?", "", before.group()).strip()
        return text, ""


def _raised(text: str) -> bool:
    """Whether a line without a traceback is an exception by the name of its type."""
    named = exception(text)
    return named is not None and _CLASS.search(named.group(1)) is not None


class _Reader:
    """Reads the lines once."""

    def __init__(self, lines: Sequence[str]) -> None:
        known = _Prefixes(lines)
        self._lines = [_Line(line, known) for line in lines]
        self._has_root_cause = any(line.text.strip() == _ROOT_CAUSE for line in self._lines)
        self._at = 0
        self._said: list[Statement] = []
        self._record: tuple[Weight, bool] | None = None
        """Weight of the logger's record right before, and whether a warning's."""
        self._chained = False

    def __iter__(self) -> Iterator[Statement]:
        while self._at < len(self._lines):
            line = self._lines[self._at]
            # A traceback may begin within its frames: its first line is missing, or another process wrote in between.
            if _TRACEBACK.match(line.text) or _FRAME_BEGINS.match(line.text):
                found = self._exception(line, Weight.FATAL if self._record is None else self._record[0])
                found.chained = self._chained
                self._said.append(found)
                self._record, self._chained = None, False
                continue
            self._at += 1
            if not self._read_mark(line) and not self._is_detail(line.text):
                self._read_statement(line)
        yield from _settle_weights(self._said)

    def _read_mark(self, line: _Line) -> bool:
        """Read a line that tells how other lines belong together. Return whether it was one."""
        text = line.text
        if _CHAIN.match(text.strip()):
            self._chained = True
        elif text.strip() == _ROOT_CAUSE:
            self._said += self._report(line)
        elif self._is_of_a_cut_report(text):
            self._at -= 1
            self._said += self._report(line)
        elif not text.strip() or _OF_THE_REPORT.match(text):
            return True
        elif _IGNORED_EXCEPTION.match(text):
            self._record = Weight.NOISE, True
        elif _IN_THREAD.match(text):
            self._record = Weight.ERROR, False
        else:
            return False
        return True

    def _is_detail(self, text: str) -> bool:
        """Whether the line belongs to the one before it. A C++ stack makes that one an error."""
        if text.startswith("Exception raised from ") and self._said and self._said[-1].kind is Kind.LINE:
            last = self._said[-1]
            last.weight = max(last.weight, Weight.ERROR)  # torch logs some errors as warnings
        return bool(_FRAME.match(text) or _HINT.match(text))

    def _read_statement(self, line: _Line) -> None:
        one = self._statement(line)
        self._said.append(one)
        more = self._at < len(self._lines)
        if PYTHON_WARNING.match(line.text) and more and self._lines[self._at].indent > line.indent:
            self._at += 1  # its source
        self._record = self._owner(one, line.text)
        if self._record is None and one.kind is not Kind.LINE:
            self._chained = False

    @staticmethod
    def _owner(one: Statement, text: str) -> tuple[Weight, bool] | None:
        """Return the weight of a traceback that follows a record of a logger: the logger's own, if it writes any."""
        if one.kind is not Kind.LINE or GLOG.match(text) or NCCL.search(text[:200]):
            return None
        if one.weight is Weight.ERROR or (one.weight is Weight.NOISE and re.search(rf"\b({WARN})\b", text[:120])):
            return Weight.ERROR, one.weight is Weight.NOISE
        return None

    def _exception(self, line: _Line, weight: Weight) -> Statement:
        """Read a traceback: its files, and the exception that ends it."""
        base = line.indent
        frames: list[str] = []
        if _TRACEBACK.match(line.text):
            self._at += 1
        while self._at < len(self._lines):
            here = self._lines[self._at]
            if hit := _FRAME_FILE.match(here.text):
                frames.append(hit.group(1))
            elif here.text.strip() and here.indent <= base:
                break
            self._at += 1
        if self._at == len(self._lines):
            return Statement("", Weight.NOISE)
        last = self._lines[self._at]
        strip = last.text.strip()
        if not _EXCEPTION_NAME.match(strip) or _HINT.match(strip) or _CRASH.match(strip):
            return Statement("", Weight.NOISE)  # the log goes on with something else
        self._at += 1
        text = self._message(last)
        kind = Kind.LAUNCHER if _LAUNCHER.match(last.text) else Kind.EXCEPTION
        return Statement(text, weight, kind, last.speaker, grouped=last.grouped, frames=frames)

    def _is_of_a_cut_report(self, text: str) -> bool:
        """Whether a field describes how a rank ended, while the report's head is not in the text."""
        field_ = _FIELD.match(text)
        return field_ is not None and not self._has_root_cause and _HOW_IT_ENDED.match(field_.group(2)) is not None

    def _report(self, line: _Line) -> Iterator[Statement]:
        """Yield torchrun's report of the rank that ended first: its traceback, if any, and its exit code."""
        fields: dict[str, str] = {}
        while self._at < len(self._lines):
            here = self._lines[self._at]
            field_ = _FIELD.match(here.text)
            if field_ and field_.group(1) == "traceback" and _TRACEBACK.match(field_.group(2)):
                here.text, here.indent = field_.group(2), 2
                yield self._exception(here, Weight.FATAL)
                continue
            if not field_ and here.text.strip() and not re.match(r"\[\d+\]:$", here.text):
                break
            if field_:
                fields[field_.group(1)] = field_.group(2).strip()
            self._at += 1
        if "exitcode" not in fields and (ended := _HOW_IT_ENDED.match(fields.get("traceback", ""))):
            fields["exitcode"] = f"-{ended.group(1)}"
        known = (f"{name}: {fields[name]}" for name in ("host", "rank", "exitcode") if fields.get(name))
        yield Statement(f"{_ROOT_CAUSE} {', '.join(known)}", Weight.FATAL, Kind.LAUNCHER, line.speaker)

    def _message(self, line: _Line) -> str:
        """Return the line together with the others of the same message."""
        if line.text.rstrip().endswith("ChildFailedError:"):  # its report follows
            return line.text.strip()
        parts = [line.text.strip()]
        while self._at < len(self._lines) and len(parts) < MESSAGE_LINES:
            here = self._lines[self._at]
            if here.speaker != line.speaker or here.grouped != line.grouped or self._begins_anew(here.text):
                break
            self._at += 1
            if here.text.strip() and not _FRAME.match(here.text) and not _HINT.match(here.text):
                parts.append(here.text.strip())
        return _ADVICE.sub("", "\n".join(parts)).strip()

    @staticmethod
    def _begins_anew(text: str) -> bool:
        strip = text.strip()
        starts = (_TRACEBACK, _CHAIN, _IGNORED_EXCEPTION, _IN_THREAD, _TERMINATE, _CRASH, _LAUNCHER)
        return (
            any(each.match(strip) for each in starts)
            or _raised(strip)
            or strip.startswith(("Exception raised from ", "frame #"))
            or (label(text) is not None and not ASCEND.match(strip))
        )

    def _statement(self, line: _Line) -> Statement:
        text, kind, whole = line.text, Kind.LINE, False
        weight = label(text)
        fatal = weight is not Weight.NOISE
        if fatal and (_ENDED_BY.search(text) or _WHAT.match(text) or _PANIC.search(text)):
            weight, kind, whole = Weight.FATAL, Kind.ABORT, True
        elif fatal and _LAUNCHER.match(text):
            weight, kind, whole = Weight.FATAL, Kind.LAUNCHER, True
        elif weight is Weight.FATAL:
            kind = Kind.ABORT
        elif weight is not None:
            whole = ASCEND.match(text) is not None  # what CANN says stands below torch_npu's line
        elif _CRASH.match(text):
            weight, kind = Weight.FATAL, Kind.CRASH
        elif _raised(text):
            weight, kind, whole = Weight.FATAL, Kind.EXCEPTION, True
        said = self._message(line) if whole else text
        grouped = kind is Kind.EXCEPTION and line.grouped
        return Statement(said, Weight.PLAIN if weight is None else weight, kind, line.speaker, grouped=grouped)


def _settle_weights(said: Sequence[Statement]) -> Iterator[Statement]:
    """Yield the statements that are not empty. A logged error after which the process went on is noise."""
    fatal = [number for number, one in enumerate(said) if one.kind is Kind.EXCEPTION and one.weight is Weight.FATAL]
    last = fatal[-1] if fatal else -1
    for number, one in enumerate(said):
        if not one.text:
            continue
        if one.kind is Kind.EXCEPTION and one.weight is Weight.ERROR and number < last:
            one.weight = Weight.NOISE
        yield one
