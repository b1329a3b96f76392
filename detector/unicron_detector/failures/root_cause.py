"""Finds the statement that says why a process ended. Pure; standard library only.

Statements that the process itself names as fatal count: an exception that nothing caught, the reason of an abort, a
fatal line. In a chain of exceptions the last one counts, unless an earlier one says more. A crash or a launcher's
report says only how the process ended, so an earlier statement says why. A peer's end looks like a network error, so
any other reason precedes it. Labels of writers are respected throughout.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from unicron_detector.failures.labels import Weight
from unicron_detector.failures.severity import Verdict
from unicron_detector.failures.statements import EXIT_REPORT, Kind, Statement, statements

Judge = Callable[[str, bool], Verdict | None]
"""Returns the verdict on a statement's text; generic: rules that merely notice an exception count, too."""

LONGEST = 500  # characters of a forwarded statement
# Rules that say how a process ended, not why; and rules that sum up what others said.
CRASHES = ("segfault", "slurm-other", "slurm-own", "nccl-internal", "launcher-report", "launcher-killed", "ray-report")
SUMMARIES = (
    "slurm-cancel",
    "nccl-system",
    "nccl-remote",
    "slurm-controller",
    "container-report",
    "accelerator-says-above",
)
# Exit codes by which torchrun ends the other ranks after one of them ended by itself.
END_REQUESTS = ("-15", "-2", "143", "130")
_ASKED_TO_END = re.compile(r"SIGTERM|\bsignal:? ?15\b|^\s*Terminated\s*$", re.IGNORECASE)
# Rules that name who failed, not why.
PLACES = ("container", "dataloader-child", "accelerator-hang", "accelerator-error")
GENERAL = ("python", "python-exception")  # rules of exceptions by their class alone
# Exceptions of Python's own sockets and pipes; the frames tell with whom they were connected.
_SOCKET = re.compile(
    r"(?:[\w.]+\.)?(?:Connection\w*Error|BrokenPipeError|EOFError|TimeoutError|timeout|gaierror|herror|SSLError|"
    r"RemoteDisconnected|IncompleteRead|ProtocolError|OSError: \[Errno (?:9|32|98|99|10\d|11[0-3])\]|"
    r"FileNotFoundError: \[Errno 2\] No such file or directory$)"
)
_LIBRARIES = (
    # A process's own workers, over pipes and Unix sockets.
    "multiprocessing multiprocess billiard loky joblib concurrent/futures torch/multiprocessing torch/utils/data "
    # Services outside the job.
    "urllib urllib3 requests requests_toolbelt httpx httpcore aiohttp http/client botocore boto3 s3fs s3transfer "
    "fsspec gcsfs adlfs google/cloud google/api_core google/auth azure huggingface_hub wandb mlflow neptune comet_ml "
    "clearml swanlab redis pymongo psycopg psycopg2 pymysql MySQLdb sqlalchemy kafka pika paramiko smtplib ftplib "
    "ldap3 minio"
).split()
_THROUGH = re.compile(rf"(?:^|/)((?:{'|'.join(map(re.escape, _LIBRARIES))})/?[\w/]{{0,120}}\.py)$")


def cause(text: str, judge: Judge) -> tuple[str, Verdict | None]:
    """Return the statement that says why the process ended, and its verdict; an empty statement for an empty text."""
    own = _own_statements(text)
    fatal = [one for one in own if one.weight is Weight.FATAL]
    best = _most_telling(own, fatal, judge)
    if best is not None:
        return best
    rest = fatal or own
    return (words(rest[-1]) if rest else ""), None


def _own_statements(text: str) -> list[Statement]:
    """Return the statements that count. If a rank ended by itself, the SIGTERM of the others does not."""
    meaningful = [one for one in statements(text) if one.weight is not Weight.NOISE]
    reports = [hit.group(1) for one in meaningful if (hit := EXIT_REPORT.search(one.text))]
    if any(status not in END_REQUESTS for status in reports):
        return [one for one in meaningful if not _ASKED_TO_END.search(one.text)]
    return meaningful


def _most_telling(own: Sequence[Statement], fatal: Sequence[Statement], judge: Judge) -> Finding:
    best = _of_the_fatal(fatal, judge)
    errors = _last([one for one in own if one.weight is Weight.ERROR], judge)
    if _rank(best) <= _SUMMARY:
        return _better(best, errors, _of_the_plain([one for one in own if one.weight is Weight.PLAIN], judge))
    if _rank(best) == _PLACE:
        return _better(best, errors)
    if best and best[1] and errors and errors[1] and _explains(errors[1], best[1]):
        return errors  # the library or Slurm says what the program's exception does not
    return best


def _explains(error: Verdict, end: Verdict) -> bool:
    if end.rule == "nccl-cuda":  # it says that a call of CUDA's failed, not how
        return error.rule != "nccl-cuda" and _rank(("", error)) == _SPECIFIC
    killed = error.rule == "host-oom" and "oom" in error.reason  # a process of the rank's own, as a rule
    return (end.rule in GENERAL and error.scope == "hardware") or (end.rule == "python-exception" and killed)


def one_line(statement: str) -> str:
    """Return a statement as one short line; its end, which names the way, stays."""
    line = " ".join(statement.split())
    return line if len(line) <= LONGEST else f"{line[: LONGEST - 105]} ... {line[-100:]}"


def words(one: Statement) -> str:
    """Return a statement's text, for an error of a socket with the library that used it: not every socket belongs to
    the job's network."""
    if one.kind is not Kind.EXCEPTION or not _SOCKET.match(one.text):
        return one.text
    through = next((hit.group(1) for file in reversed(one.frames) if (hit := _THROUGH.search(file))), "")
    return f"{one.text} (through {through})" if through else one.text


# ------------------------------------------------------------------------------------------------ ranking
Finding = tuple[str, Verdict | None] | None
_NONE, _CRASH, _SUMMARY, _NETWORK, _PLACE, _SPECIFIC = range(6)


def _rank(found: Finding) -> int:
    """Rank a statement by what it tells: nothing, how the process ended, what the others saw, who failed, or why."""
    if found is None or found[1] is None:
        return _NONE
    rule = found[1].rule
    if rule.startswith(("exit-", "signal-")):  # of a launcher's report
        return _CRASH
    for rules, rank in ((CRASHES, _CRASH), (SUMMARIES, _SUMMARY), (PLACES, _PLACE)):
        if rule in rules:
            return rank
    return _NETWORK if found[1].scope == "network" else _SPECIFIC


def _better(*found: Finding) -> Finding:
    """Return the finding that says most; of equals the first."""
    return max(found, key=_rank)


def _judge_statement(one: Statement, judge: Judge, generic: bool = False) -> Finding:
    text = words(one)
    verdict = judge(text, generic)
    return (text, verdict) if verdict is not None else None


def _last(candidates: Sequence[Statement], judge: Judge) -> Finding:
    """Return the last statement that a rule knows, or an earlier one that says more about the reason."""
    best: Finding = None
    for one in reversed(candidates):
        best = _better(best, _judge_statement(one, judge))
        if _rank(best) in (_NETWORK, _SPECIFIC):
            break
    return best


def _is_broken(found: Finding) -> bool:
    """Whether hardware broke. Other ranks' statements are then only consequences."""
    return found is not None and found[1] is not None and (found[1].scope, found[1].severity) == ("hardware", 1)


def _of_the_fatal(fatal: Sequence[Statement], judge: Judge) -> Finding:
    if not fatal:
        return None
    last = fatal[-1]
    links = _chain(fatal)
    best = _of_a_chain(links, judge)
    alone = len({one.speaker for one in fatal}) == 1 and not last.grouped
    if not alone and (
        broken := next((each for one in reversed(fatal) if _is_broken(each := _judge_statement(one, judge))), None)
    ):
        return broken
    if last.kind is not Kind.EXCEPTION or not alone:
        for one in reversed(fatal[: len(fatal) - len(links)]):
            if _rank(best) == _SPECIFIC:
                break
            best = _better(best, _judge_statement(one, judge))
    if best is not None:
        return best
    # A class of exceptions that no rule knows is the program's own; so is a fatal line.
    own = [one for one in reversed(fatal) if one.kind is not Kind.LAUNCHER]
    return next((found for one in own if (found := _judge_statement(one, judge, True))), None)


def _chain(fatal: Sequence[Statement]) -> Sequence[Statement]:
    """Return the last exception with those from which it was raised, or while handling, in the order of the log."""
    first = len(fatal) - 1
    while first > 0 and fatal[first].chained:
        first -= 1
    return fatal[first:]


def _of_a_chain(links: Sequence[Statement], judge: Judge) -> Finding:
    """Return the last link that a rule knows. Errors of devices and files do not steer a program, so an earlier one
    precedes an exception that only its class describes, and one of the hardware precedes all."""
    findings = [_judge_statement(one, judge) for one in links]
    best = next((each for each in reversed(findings) if each is not None), None)
    for each in findings:
        if each is None or each[1] is None or best is None or best[1] is None:
            continue
        hardware = each[1].scope == "hardware" and best[1].scope != "hardware"
        says_more = best[1].rule in GENERAL and each[1].scope in ("storage", "unknown") and _rank(each) == _SPECIFIC
        if hardware or says_more:
            best = each
    return best


def _of_the_plain(plain: Sequence[Statement], judge: Judge) -> Finding:
    """Judge lines without a label as one text, by the table's order."""
    text = "\n".join(one.text for one in plain)
    verdict = judge(text, False) if text else None
    if verdict is None:
        return None
    line = next((each.text for each in reversed(plain) if _same(judge(each.text, False), verdict)), text)
    return line, verdict


def _same(one: Verdict | None, other: Verdict) -> bool:
    return one is not None and one.rule == other.rule
