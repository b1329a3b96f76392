"""Labels of loggers and libraries, which give a line its weight. Standard library only: ranks and agents use it."""

from __future__ import annotations

import enum
import re


class Weight(enum.IntEnum):
    """The weight that a statement's writer gives it."""

    NOISE = 0  # information, a warning, or a part of a report that says nothing by itself
    PLAIN = 1  # no label
    ERROR = 2  # labelled as an error
    FATAL = 3  # the process names it as its end


INFO = "INFO|DEBUG|TRACE|NOTICE|VERBOSE"
WARN = "WARNING|WARN"
BAD = "ERROR|ERR|CRITICAL|CRIT|FATAL|SEVERE"
_LETTERS = {"I": Weight.NOISE, "V": Weight.NOISE, "D": Weight.NOISE, "W": Weight.NOISE, "E": Weight.ERROR}
GLOG = re.compile(r"\[?([IVDWEFC])\d{0,8}(?: [\d:.]+)?(?: +\d+)? [\w./<>-]+\.\w+:\d+\] ?")
_TENSORFLOW = re.compile(r"(?:\d{4}-\d\d-\d\d [\d:.,]+: )?([IWEF]) (?=[\w/.]+\.\w+:\d+\])")
_DEATH_SIGNAL = re.compile(r"\] Received (?:\d{1,2}|SIG[A-Z]+) death signal, shutting down workers")
_NEMO = re.compile(r"\[NeMo ([IWEDF]) [^\]]*\]")
_LOGGER = re.compile(
    rf"(?<![=\w.])({INFO}|{WARN}|{BAD})\b(?=[\]\s:|)>\[-]|$)",
)
HEADER = re.compile(rf"[^\n]{{0,120}}?(?<![=\w.])(?:{INFO}|{WARN}|{BAD})\b[\s:|\])>-]{{0,20}}")
LEVEL = re.compile(rf"\blevel\"?[=:] ?\"?(?:({INFO}|{WARN})|{BAD})\b", re.IGNORECASE)
_LOG_LINE = re.compile(  # a line of a logger begins so: its level, a date, or something in brackets
    rf" ?(?:{INFO}|{WARN}|{BAD})\b[\s:|\[-]| ?\[|\(|<|\d{{2,4}}[-/:.](?:\d\d|[A-Z][a-z]{{2}}-\d)|time=|ts=|\{{\"|"
    r"[A-Z][a-z]{2} +\d+ [\d:]+"
)
NCCL = re.compile(r"\b(?:[NR]CCL|CCOM) (INFO|TRACE|WARN|ABORT)\b")
# After these warnings NCCL and RCCL go on, by their sources (docs/behaviour/nccl.toml): something optional is missing,
# or another value is used.
_NCCL_GOES_ON = re.compile(
    r"\bWARN .{0,160}?(?:rocprofiler-register failed|Missing \"|NUMA auto balancing|(?:falling back|as fallback)\b|"
    r"(?:being )?ignored\b|\bIgnoring\b|\bignoring\b|Unsetting\b|, setting |Continue\b|skipping\b|\bSkipping\b|"
    r"Limiting value|\bcap it to\b|set both to\b|disabling \w|Cannot enable MSCCL|Could not find real path of \S+ \(|"
    r"Unable to (?:open device|query port)|GID table changed|unknown event type|non-fatal async event|"
    r"Got async event ?: (?:client reregistration|port active|(?:LID|P_Key|SM|GID table) change|"
    r"communication established|send queue drained|last WQE reached|SRQ limit reached)|"
    r"Failed to open libibverbs|merged? .{0,40}failed\. Try|must be a multiple of|NPKIT_DUMP_DIR is empty)"
)
_RCCL_FATAL = re.compile(r"[\w.-]{1,64}:\d+:\d+ \[-?\d+\] \[FATAL ERROR\]: ")
_CCL = re.compile(r"[\d:-]{10,24}:?\(\d+\) \|CCL_(ERROR|WARN|INFO|DEBUG|TRACE)\| ")
ASCEND = re.compile(r"\[ERROR\] \d{4}-\d\d-\d\d-[\d:.]+ \(PID:")  # a line of its exceptions
_LIBFABRIC = re.compile(r"libfabric:\d+:.{0,200}?<(info|trace|debug|warn|critical)>")
_UCX = re.compile(r"\bUCX +(ERROR|FATAL|WARN|INFO|DEBUG|DIAG|TRACE)\b")
PYTHON_WARNING = re.compile(r"(?:\S+:\d+: )\w*Warning: ")
_SLURM = re.compile(
    r"(?:(?:srun|slurmstepd|slurmd|sbatch|salloc)\S{0,64}:|\[\d{4}-\d\d-\d\dT[\d:.]{8,15}\]) (?:error|fatal): "
)


def label(text: str) -> Weight | None:
    """Return the weight that the line's own writer gives it; None for a line without a label."""
    weight = _label_of_transport(text)
    return weight if weight is not None else _label_of_logger(text)


def _label_of_transport(text: str) -> Weight | None:
    if hit := NCCL.search(text[:200]):  # a WARN of NCCL is the worst that it says
        bad = hit.group(1) in ("WARN", "ABORT") and not _NCCL_GOES_ON.search(text)
        return Weight.ERROR if bad else Weight.NOISE
    if hit := _CCL.match(text):
        return Weight.ERROR if hit.group(1) == "ERROR" else Weight.NOISE
    if _RCCL_FATAL.match(text):
        return Weight.ERROR
    if hit := _LIBFABRIC.match(text):
        return Weight.ERROR if hit.group(1) in ("warn", "critical") else Weight.NOISE
    if hit := _UCX.search(text[:160]):
        return Weight.ERROR if hit.group(1) in ("ERROR", "FATAL") else Weight.NOISE
    return None


def _label_of_logger(text: str) -> Weight | None:
    if hit := GLOG.match(text) or _TENSORFLOW.match(text) or _NEMO.match(text):
        # TensorFlow logs a failed operation as a warning, and torchrun its own end.
        if "/op_kernel.cc:" in text[:120] or _DEATH_SIGNAL.search(text):
            return Weight.ERROR
        return _LETTERS.get(hit.group(1), Weight.FATAL)
    if PYTHON_WARNING.match(text):
        return Weight.NOISE
    if _SLURM.match(text):
        return Weight.ERROR
    if _LOG_LINE.match(text):
        if hit := LEVEL.search(text[:200]):
            return Weight.NOISE if hit.group(1) else Weight.ERROR
        if hit := _LOGGER.search(text[:120]):
            return Weight.ERROR if re.fullmatch(BAD, hit.group(1)) else Weight.NOISE
    return None
