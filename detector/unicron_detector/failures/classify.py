"""Classifies error texts, exit statuses, Xids and Slurm states by the severity table.

Standard library only: ranks classify their own exceptions before they die.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import re
import signal
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import replace

from unicron_detector.failures import root_cause as last_words
from unicron_detector.failures.prefilter import search
from unicron_detector.failures.severity import (
    ACTIONS,
    REPORT,
    Rule,
    Severity,
    SeverityTableError,
    Table,
    Verdict,
    default_table,
    fold_case,
)
from unicron_detector.failures.speakers import library_lines, own_words
from unicron_detector.failures.statements import (
    EXIT_REPORT,
    bare_line,
    head_and_tail,
    is_information,
    of_nccl,
    tells_of_no_end,
)
from unicron_detector.failures.text_budget import END_JUDGED, NOT_JUDGED, Budget, alike

# The head and the tail of a longer statement are read; the middle is the application's own noise.
MAX_TEXT = 8 * 1024
TEXTS_KEPT = 512
# Causes that only programs report, besides the application's own.
_OF_PROGRAMS = frozenset(
    ("checkpoint_corrupt", "connection_refused", "connection_reset", "nccl_timeout", "other_network_error")
)
_XID = re.compile(
    r"NVRM:?\s{0,9}(?:GPU at \S{1,120}:\s{0,9})?Xid\s{0,9}(?:\(([^)\n]{0,120})\))?:?\s{0,9}(\d{1,9})([^\n]*)",
    re.IGNORECASE,
)
_ERRNO = re.compile(r"-E[A-Z][A-Z0-9]{1,14}\b")
_STATUS_NAMES = re.compile(r"(Derived)?ExitCode[=:]\s*|\(.*\)$", re.IGNORECASE)
_SIGNAL_FLAG = re.compile(r"RaisedSignal:(\d+)\S*", re.IGNORECASE)
_SLURM_STATUS = re.compile(r"\s*(\d+):(\d+)\s*")


class Classifier:
    """Classifies by one table; all threads share one instance. Recent texts cost nothing: all ranks of a job may report
    the same at once, except for who and where they are (`text_budget.alike`)."""

    def __init__(self, table: Table | None = None) -> None:
        self.table = table or default_table()
        self._match = functools.lru_cache(maxsize=TEXTS_KEPT)(self._match_text)
        self._by_exit = functools.lru_cache(maxsize=TEXTS_KEPT)(self._exit)
        self._judged: OrderedDict[tuple[str, str, bool, bool], Verdict | None] = OrderedDict()
        self._budget: Budget | None = None
        self._job = ""

    def within(self, budget: Budget, job: str) -> Classifier:
        """Return this classifier for texts of one job: new texts are charged to the job's budget."""
        bound = copy.copy(self)
        bound._budget, bound._job = budget, job
        return bound

    def load(self, extra: Mapping[str, object]) -> Classifier:
        """Return a classifier whose table begins with an admin's rules.

        ``extra``: the content of ``unicron.toml`` with ``[[severity.rule]]``, ``[[severity.cause]]``. Raises
        SeverityTableError for a wrong rule.
        """
        section = extra.get("severity", extra)
        if not isinstance(section, Mapping):
            raise SeverityTableError("severity table: [severity] must be a table with [[severity.rule]] entries")
        rules, causes = section.get("rule", []), section.get("cause", [])
        if not isinstance(rules, list) or not isinstance(causes, list):
            raise SeverityTableError("severity table: write [[severity.rule]], [[severity.cause]] with double brackets")
        return Classifier(self.table.with_rules(rules, causes))

    def text(self, text: str, source: str = "exception") -> Verdict:
        """Return the verdict on an error text; for an unknown one the table's default (SEV2, restart), and for an
        unknown line of the kernel only a report.

        ``source``: "exception", "stderr", "kernel", "nccl", "watchdog", ... (rules may hold for some sources only).
        """
        verdict, note = self.judge(text, source, generic=True, weak=True)
        verdict = verdict or self._unknown(text, source)
        return replace(verdict, reason=f"{verdict.reason}; {note}") if note else verdict

    def match(self, text: str, source: str = "exception", generic: bool = False) -> Verdict | None:
        """Judge as ``text`` does, but return None if no rule knows the fault: for streams of mostly harmless lines.

        ``generic``: rules that merely notice an exception count, too.
        """
        verdict, note = self.judge(text, source, generic)
        return replace(verdict, reason=f"{verdict.reason}; {note}") if verdict and note else verdict

    def judge(
        self, text: str, source: str = "exception", generic: bool = False, weak: bool = False
    ) -> tuple[Verdict | None, str]:
        """Return a rule's verdict, and what part of the text was not judged because the budget is spent, or "".

        weak: if nothing else is known, a guess by a few of the last words counts.
        """
        kernel = source == "kernel"
        key = text if kernel else alike(text), source, generic, weak
        with contextlib.suppress(KeyError):
            return self._judged[key], ""
        part = text if self._budget is None else self._budget.charge(self._job, text, kernel)
        verdict = self._by_words(part, source, generic, weak) if part else None
        if len(part) < len(text):
            return verdict, END_JUDGED if part else NOT_JUDGED
        self._judged[key] = verdict
        while len(self._judged) > TEXTS_KEPT:
            self._judged.popitem(last=False)
        return verdict, ""

    def _by_words(self, text: str, source: str, generic: bool, weak: bool) -> Verdict | None:
        if source == "kernel":
            return self._match(head_and_tail(text, MAX_TEXT), source, generic)
        if "\n" in text.strip():
            verdict = self.last_words(text, source, generic)[1]
        else:
            line = bare_line(head_and_tail(text, MAX_TEXT))
            verdict = self._match(line, source, generic)
            if verdict is not None and is_information(line) and (not weak or verdict.scope == "application"):
                verdict = None  # its writer goes on without what it speaks of
        if verdict is None and weak:
            statement = self.last_words(text, source)[0]
            verdict = self._match(head_and_tail(statement, MAX_TEXT), source, True, True)
        return verdict

    def last_words(self, text: str, source: str = "stderr", generic: bool = True) -> tuple[str, Verdict | None]:
        """Find in a process's last lines the statement of why it ended, and judge it (failures.root_cause).

        The statement alone gets the same verdict, so it can be forwarded in place of the lines.
        """
        statement, verdict = last_words.cause(
            text, lambda each, general: self._match(head_and_tail(each, MAX_TEXT), source, general)
        )
        if verdict is None and generic and statement:
            verdict = self._match(head_and_tail(statement, MAX_TEXT), source, True)
        return statement, verdict

    def _match_text(self, text: str, source: str, generic: bool, weak: bool = False) -> Verdict | None:
        if source == "kernel":
            return self._match_kernel(text, generic, weak)
        if report := EXIT_REPORT.search(text):
            code, number = _split_status(int(report.group(1)))
            evidence = f"{source} text has a launcher's report: {_status_words(code, number)}"
            return self._by_status(code, number, evidence)
        by_libraries = library_lines(text)
        views = fold_case(text), fold_case(by_libraries), fold_case(own_words(text))
        return self._by_rules(text, by_libraries, views, source, generic, weak)

    def _match_kernel(self, text: str, generic: bool, weak: bool) -> Verdict | None:
        """Judge each line of a kernel as a statement, and return the worst verdict."""
        if "\n" in text.strip():
            lines = (self._match_kernel(line, generic, weak) for line in text.splitlines())
            return self._worst(verdict for verdict in lines if verdict)
        xids = [self.xid(int(hit[2]), hit[1] or "", hit[3]) for hit in _XID.finditer(text)]
        if xids:
            return self._worst(xids)
        text = _ERRNO.sub(lambda hit: " " * len(hit.group()), text)  # a driver's status, whatever its subject
        low = fold_case(text)
        return self._by_rules(text, text, (low, low, low), "kernel", generic, weak)

    def _by_rules(
        self, text: str, by_libraries: str, views: tuple[str, str, str], source: str, generic: bool, weak: bool
    ) -> Verdict | None:
        """Return the verdict of the first rule that finds its words.

        views: the lower-case text for most rules, that of libraries for rules of hardware, and the program's own words
        for rules of the network.
        """
        low, low_by_libraries, low_of_network = views
        candidates = {view: self.table.candidates(view) for view in set(views)}
        rules = self.table.of_kind("text")
        for number in sorted({number for numbered in candidates.values() for number in numbered}):
            rule = rules[number]
            if not self._applies(rule, source, generic, weak):
                continue
            network = self.table.causes[rule.cause].scope == "network"
            view = low_by_libraries if rule.hardware else low_of_network if network else low
            if hit := search(candidates[view].get(number, ()), view):
                words = (by_libraries if rule.hardware else text)[hit.start() : hit.end()]
                shown = _quotation(words if source == "kernel" else alike(words))
                return self._verdict(rule, f"{source} text has {shown}")
        return None

    def _applies(self, rule: Rule, source: str, generic: bool, weak: bool) -> bool:
        if rule.only_from:
            if source not in rule.only_from:
                return False
        elif source == "kernel" and self._is_of_programs(rule):
            return False
        return (generic or not rule.generic) and (weak or not rule.weak)

    def _is_of_programs(self, rule: Rule) -> bool:
        """Whether only programs report this: a kernel's words for its own affairs resemble theirs for set-ups and
        peers. An admin's rule is taken literally."""
        if rule.of_admin:
            return False
        cause = self.table.causes[rule.cause]
        return cause.name in _OF_PROGRAMS or (cause.scope == "application" and cause.name != "host_out_of_memory")

    @staticmethod
    def _worst(verdicts: Iterable[Verdict]) -> Verdict | None:
        return min(verdicts, key=lambda verdict: (verdict.action == REPORT, verdict.severity), default=None)

    def exit(self, status: int | str | signal.Signals, stderr_tail: str = "", oom: bool = False) -> Verdict:
        """Return the verdict on a process that ended.

        ``status``: a return code as Python gives it (negative: the signal), a shell's 128 + signal, a
        ``signal.Signals``, a name ("SIGKILL") or Slurm's "code:signal". ``oom``: the cgroup or the kernel counted an
        out-of-memory kill. A dead process cannot be regrouped in place, so the verdict is never milder than SEV2,
        unless it ended with 0. Raises ValueError for a text that is no status.
        """
        if not stderr_tail and type(status) is int:  # as of all ranks of a job that were killed
            return self._by_exit(status, "", oom)
        return self._exit(status, stderr_tail, oom)

    def _exit(self, status: int | str | signal.Signals, stderr_tail: str, oom: bool) -> Verdict:
        if isinstance(status, str):
            raised = _SIGNAL_FLAG.match(status.strip())
            status = f"0:{raised.group(1)}" if raised else _STATUS_NAMES.sub("", status).strip()
            if rule := self._by_name("slurm", status):  # statuses by which Slurm tells of itself
                return self._verdict(rule, f"Slurm's exit status {status}")
        code, number = _split_status(status)
        end = _status_words(code, number)
        rule = self._by_name("signal", "OOM") if oom else None
        if rule:
            return self._verdict(rule, f"{end} and the kernel counted an out-of-memory kill in its cgroup")
        by_words, note = None, ""
        if stderr_tail and (code or number):
            by_words, note = self.judge(stderr_tail, "stderr", generic=True)
        end = f"{end}; {note}" if note else end
        if by_words and by_words.action != REPORT:
            verdict = replace(by_words, reason=f"{end}; {by_words.reason}")
            if verdict.severity <= Severity.SEV2:
                return verdict
            reason = f"{verdict.reason}; the process is gone, so it is restarted instead of reattempted"
            return replace(verdict, severity=Severity.SEV2, action=ACTIONS[Severity.SEV2], reason=reason)
        return self._by_status(code, number, end)

    def _by_status(self, code: int, number: int, end: str) -> Verdict:
        if number:
            rule = self._by_name("signal", _signal_name(number)) or self._by_name("signal", "*")
        else:
            rule = next((rule for rule in self.table.of_kind("exit") if code in rule.codes), None)
        if rule:
            return self._verdict(rule, end)
        return self._make("exited_abnormally", "exit-default", end)

    def xid(self, code: int, where: str = "", rest: str = "") -> Verdict:
        """Return the verdict on an NVIDIA Xid of the kernel log. An unknown one counts as the application's: SEV2.

        ``where``: the device. ``rest``: the line after the code, which some rules read.
        """
        evidence = f"Xid {code}" + (f" at {where}" if where else "")
        for rule in self.table.of_kind("xid"):
            if code in rule.codes and (not rule.pattern or rule.regex.search(fold_case(rest))):
                return self._verdict(rule, evidence)
        return self._make("cuda_error", "xid-default", f"{evidence} is not in the table; taken as the application's")

    def slurm(self, state: str) -> Verdict:
        """Return the verdict on a Slurm job state (NODE_FAIL, OUT_OF_MEMORY, ...) or node state (DOWN, ...)."""
        words = _slurm_words(state)
        matches = [rule for word in words if (rule := self._by_name("slurm", word) or self._by_cut_name(word))]
        if not matches:
            return self._make("exited_abnormally", "slurm-default", f"Slurm state {state!r} is not in the table")
        verdicts = [self._verdict(rule, f"Slurm state {'+'.join(words)}") for rule in matches]
        return min(verdicts, key=lambda verdict: (verdict.action == REPORT, verdict.severity))

    def _by_cut_name(self, word: str) -> Rule | None:
        """Return the rule of a word that a table of Slurm has cut: OUT_OF_ME+."""
        rules = self.table.of_kind("slurm")
        return next((rule for rule in rules if len(word) > 4 and any(n.startswith(word) for n in rule.names)), None)

    def cause(self, name: str, reason: str = "") -> Verdict:
        """Return the verdict on a cause known by name (a lost heartbeat, a hang by statistics). Raises KeyError."""
        return self._make(name, f"cause-{name}", reason or self.table.causes[name].title)

    def _by_name(self, kind: str, name: str) -> Rule | None:
        return next((rule for rule in self.table.of_kind(kind) if name in rule.names), None)

    def _verdict(self, rule: Rule, evidence: str) -> Verdict:
        cause = self.table.causes[rule.cause]
        severity = rule.severity or cause.severity
        action = rule.action or cause.action or ACTIONS[severity]
        why = f": {rule.why}" if rule.why else ""
        scope = "unknown" if rule.weak else cause.scope  # a guess acquits nobody: what returns on a node escalates
        return Verdict(rule.cause, severity, action, f"{evidence} -> {cause.title}{why}", rule.id, scope)

    def _make(self, cause_name: str, rule_id: str, reason: str) -> Verdict:
        cause = self.table.causes[cause_name]
        return Verdict(cause.name, cause.severity, cause.first_action, reason, rule_id, cause.scope)

    def _unknown(self, text: str, source: str) -> Verdict:
        line = next((line.strip() for line in reversed(text.splitlines()) if re.search(r"\w", line)), "")
        if source == "kernel":  # most of what a kernel says is no fault
            reason = f"no rule knows {_quotation(line)}; nothing is done"
            return self._make("hardware_warning", "kernel-default", reason)
        part = head_and_tail(text, MAX_TEXT)
        spoken = (self._match(each, source, True) for each in part.splitlines() if not of_nccl(each))
        if tells_of_no_end(part) and all(each is None or each.scope == "application" for each in spoken):
            return self._make("no_fault", "information", f"{source} text has information and warnings alone")
        reason = (
            f"no rule knows {_quotation(line)}; the default is to restart the process and to escalate if that fails"
        )
        return self._make(self.table.default, "default", reason)


def _quotation(text: str) -> str:
    text = " ".join(text.split())
    return '"' + (text if len(text) <= 90 else text[:87] + "...") + '"'


def _slurm_words(state: str) -> list[str]:
    """Return the base state and the flags, some of which sinfo writes as a sign after the word."""
    words = []
    for word in re.split(r"[+\s,]+", state.strip().upper()):
        bare = word.rstrip("*~#!%$@^-")
        words += [bare] * bool(bare) + ["NOT_RESPONDING"] * word[len(bare) :].count("*")
    return words


def _split_status(status: int | str | signal.Signals) -> tuple[int, int]:
    """Return (exit code, signal number), one of them 0. Raises ValueError for a text that is no status."""
    if isinstance(status, signal.Signals):
        return 0, int(status)
    if isinstance(status, str):
        slurm = _SLURM_STATUS.fullmatch(status)
        if slurm:
            code, number = int(slurm.group(1)), int(slurm.group(2))
            return (0, number) if number else _split_status(code)
        name = status.strip().upper()
        if name.lstrip("-").isdecimal():
            return _split_status(int(name))
        try:
            return 0, int(signal.Signals[name if name.startswith("SIG") else "SIG" + name])
        except KeyError:
            raise ValueError(f"{status!r} is no exit status; use a number, SIGNAME or Slurm's code:signal") from None
    if status < 0:
        return 0, -status
    # 128 + n is a shell's or srun's way of saying "killed by signal n"; real signals end at 64.
    if 128 < status <= 128 + 64:
        return 0, status - 128
    return status, 0


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"SIG{number}"


def _status_words(code: int, number: int) -> str:
    return f"process killed by {_signal_name(number)}" if number else f"process ended with exit status {code}"


@functools.cache
def default_classifier() -> Classifier:
    """Return the classifier of the shipped table, made once per process."""
    return Classifier(default_table())
