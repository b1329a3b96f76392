"""Health checks of others: NHC, gcm, DCGM, or any program, by a line of `[health]` in unicron.toml.

A program runs as the checks do, without a shell, in its own session, with a short environment and no input. Its exit
status counts, as its kind defines it, and the first meaningful line of its output. A program that cannot be run proves
nothing about the node: it is a warning if missing, and unknown if it hangs or is killed.
"""

from __future__ import annotations

import contextlib
import errno
import os
import pwd
import re
import shlex
import signal
import stat
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence

import msgspec

from unicron_detector.health.findings import BAD, GOOD, UNKNOWN, WARNING, Finding
from unicron_detector.health.program_output import MOST_BYTES, Output, TooMuchOutput

LINE = 300  # characters of a program's output
LOOK_SECONDS = 0.1  # between two looks at whether a program is still wanted
GRACE_SECONDS = 0.2  # kept back from the check's time limit, to kill the program
ENVIRONMENT = ("PATH", "LC_ALL", "LANG", "SLURMD_NODENAME", "SLURM_CONF", "SLURM_JOB_ID", "HOME")
MOST_INTERPRETERS = 5  # that the kernel follows from one to the next
MOST_LINKS = 40  # symbolic links that the kernel follows in one path
# Programs that run what an argument of theirs names
_RUNS_OTHERS = re.compile(
    r"(?:a|ba|da|k|z)?sh|python[\d.]*|perl|ruby|env|flock|ionice|nice|nohup|numactl|runuser|setpriv|setsid|stdbuf|sudo|"
    r"taskset|timeout"
)
USUAL_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


class HealthProgram(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """One program of `programs` in [health], if its command alone is not enough."""

    command: str
    """The program's absolute path and its arguments; no shell reads it."""
    bad: tuple[int, ...] | None = None
    """Exit statuses that prove the node bad; by default as its kind of program defines them."""
    warning: tuple[int, ...] | None = None
    """Exit statuses that cause a warning."""
    user: str = ""
    """The user that runs it; by default the one that runs the checks."""
    prolog: bool = False
    """Run it before each job, too, and not only by HealthCheckProgram."""


def as_program(given: str | HealthProgram) -> HealthProgram:
    """Convert an entry of `programs`, which may be just a command, to a HealthProgram."""
    return HealthProgram(command=given) if isinstance(given, str) else given


# ------------------------------------------------------------------------------------------------------------- kinds


def nagios(status: int, lines: Sequence[str]) -> Finding:
    """Judge plugins of Nagios, gcm's `health_checks` and most scripts: 0 fine, 1 warning, 2 critical, 3 unknown."""
    verdict = {0: GOOD, 1: WARNING, 2: BAD}.get(status, UNKNOWN)
    return Finding(verdict, _line(lines, status), {"status": status})


def nhc(status: int, lines: Sequence[str]) -> Finding:
    """Judge LBNL's Node Health Check: every status but 0 means that a check of the site's own has failed."""
    errors = [line for line in lines if line.startswith("ERROR")]
    return Finding(GOOD if status == 0 else BAD, _line(errors or lines, status), {"status": status})


def dcgm(status: int, lines: Sequence[str]) -> Finding:
    """Judge `dcgmi health -c` and `dcgmi diag` by their table, since `health -c` always ends with 0. Another status
    without a verdict means that DCGM could not be asked."""
    for word, verdict in (("Fail", BAD), ("Warn", WARNING)):
        if rows := [_cells(line) for line in lines if re.search(rf"\|\s*{word}", line)]:
            return Finding(verdict, "; ".join(rows)[:LINE], {"status": status})
    passed = any(re.search(r"\|\s*(Pass|Healthy)", line) for line in lines)
    if status == 0 and passed:
        return Finding(GOOD, "passed", {"status": status})
    return Finding(UNKNOWN, _line(lines, status), {"status": status})


SMART_FAILING = 8
SMART_BITS = {  # smartctl(8), EXIT STATUS: the same in smartmontools 7.3, 7.4 and 7.5
    1: "its command line was not understood, or the kind of device not found out",
    2: "the device could not be opened",
    4: "a SMART command failed, or a checksum was wrong",
    SMART_FAILING: "the device says that it is failing",
    16: "attributes are below their threshold",
    32: "attributes were below their threshold in the past",
    64: "the device's log has errors",
    128: "the log of self-tests has errors",
}


def smartctl(status: int, lines: Sequence[str]) -> Finding:
    """Judge the mask with which smartctl ends. Only the device's own word that it fails proves something; that smartctl
    could not ask the device says nothing about the node."""
    words = "; ".join(text for bit, text in SMART_BITS.items() if status & bit)
    verdict = BAD if status & SMART_FAILING else UNKNOWN if status & 3 else WARNING if status else GOOD
    return Finding(verdict, words or _line(lines, status), {"status": status})


KINDS: dict[str, Callable[[int, Sequence[str]], Finding]] = {"nhc": nhc, "dcgmi": dcgm, "smartctl": smartctl}
"""By the name of the program's file; all others are judged as plugins of Nagios."""


def _cells(row: str) -> str:
    return " ".join(cell.strip() for cell in row.split("|") if cell.strip())


def _line(lines: Sequence[str], status: int) -> str:
    return lines[0][:LINE] if lines else f"exit status {status}"


# ----------------------------------------------------------------------------------------------------------- running


def check_program(name: str, given: str | HealthProgram, timeout: float) -> Finding:
    """Run the program and return its finding. A program that cannot be trusted is not run."""
    program = as_program(given)
    command = shlex.split(program.command)
    if why := why_unfit(command, program.user):
        return Finding(WARNING, f"{name} is not run: {why}")
    try:
        status, out = run(command, program.user, max(0.1, timeout - GRACE_SECONDS))
    except subprocess.TimeoutExpired:
        return Finding(UNKNOWN, f"{command[0]}: no answer within {timeout:g} s; it was ended")
    except TooMuchOutput as error:
        return Finding(UNKNOWN, f"{command[0]}: {error}; it was ended")
    except OSError as error:
        return Finding(WARNING, f"{name} is not run: {command[0]}: {error.strerror}")
    if status < 0:
        return Finding(UNKNOWN, f"{command[0]} was ended by {signal.Signals(-status).name}")
    lines = [line.strip() for line in out.decode(errors="replace").splitlines() if re.search(r"\w", line)]
    return judge(program, os.path.basename(command[0]), status, lines)


def judge(program: HealthProgram, file: str, status: int, lines: Sequence[str]) -> Finding:
    """Return the verdict on a program that has ended. file: its name, which gives its kind. Pure."""
    finding = KINDS.get(file, nagios)(status, lines)
    if program.bad is None and program.warning is None:
        return finding
    verdict = GOOD if status == 0 else UNKNOWN
    verdict = WARNING if status in (program.warning or ()) else verdict
    verdict = BAD if status in (program.bad or ()) else verdict
    return Finding(verdict, finding.reason, finding.values)


def why_unfit(command: Sequence[str], user: str = "") -> str:
    """Return why the program must not be run here; empty if it may be. Only root may have written what root runs."""
    if not command:
        return "its command is empty"
    if user:
        try:
            pwd.getpwnam(user)
        except KeyError:
            return f"there is no user {user!r} here"
    if why := why_untrusted(command[0]):
        return why
    files = [] if user else _files_named(command)
    return next(filter(None, (why_untrusted(path, executed=False) for path in files)), "")


def _files_named(command: Sequence[str]) -> list[str]:
    """Return the files in a command's arguments, or within a text for a shell, that it may run: programs, and all files
    if the program is known to run what it reads."""
    reads = _RUNS_OTHERS.fullmatch(os.path.basename(command[0]))
    words = [word for text in command[1:] for word in (text, *re.split(r"[\s'\"`;|&<>(){}=]+", text)) if word]
    paths = dict.fromkeys(os.path.join("/", word) for word in words)  # a program is started in /
    return [path for path in paths if os.path.isfile(path) and (reads or os.access(path, os.X_OK))]


def why_untrusted(program: str, executed: bool = True) -> str:
    """Return why this process must not run the program, and what to do; empty if it may.

    Only root and this process's user may be able to change the program and all that its path leads through: links, the
    folders up to /, the interpreters of a script. Then it can be run by that path, which a script may read. executed:
    the kernel runs the file; False if an interpreter reads it.
    """
    for _ in range(MOST_INTERPRETERS):
        try:
            path, why = _follow_path(program)
            if why:
                return why
            if not stat.S_ISREG(os.stat(path).st_mode) or (executed and not os.access(path, os.X_OK)):
                return f"no program: `chmod u+x {path}`"
            program = _interpreter(path) if executed else ""
        except OSError as error:
            return f"{program}: {error.strerror}: install it, or take its line out of unicron.toml"
        if not program:
            return ""
    return f"{program} is one interpreter too many: name the program itself"


def _follow_path(program: str) -> tuple[str, str]:
    """Follow a path from the root. Return its end, and how others than root and this user can change it, or "".

    Each step is checked after all before it are known to be safe. Raises OSError.
    """
    at, rest = "/", program.split("/")[::-1]
    links = 0
    if not program.startswith("/"):
        return program, f"{program} is no absolute path: write one"
    if why := _changeable("/", os.lstat("/")):
        return "/", why
    while rest:
        name = rest.pop()
        if name in ("", ".", ".."):
            at = os.path.dirname(at) if name == ".." else at
            continue
        here = os.path.join(at, name)
        status = os.lstat(here)
        if why := _changeable(here, status):
            return here, why
        if not stat.S_ISLNK(status.st_mode):
            at = here
            continue
        links += 1
        if links > MOST_LINKS:
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
        target = os.readlink(here)
        at = "/" if target.startswith("/") else at
        rest += target.split("/")[::-1]
    return at, ""


def _changeable(path: str, status: os.stat_result) -> str:
    """Describe how others may change the path, and what to do; empty if they cannot.

    A sticky bit protects the names in a folder, but not the content of a file. A link has no mode of its own.
    """
    if status.st_uid not in (0, os.geteuid()):
        return f"{path} has to be root's or this user's own: `chown root {path}`"
    kept = stat.S_ISLNK(status.st_mode) or (stat.S_ISDIR(status.st_mode) and status.st_mode & stat.S_ISVTX)
    return f"others can write {path}: `chmod go-w {path}`" if status.st_mode & 0o022 and not kept else ""


def _interpreter(path: str) -> str:
    """Return the interpreter of a script; empty for any other program. Raises OSError."""
    try:
        with open(path, "rb") as file:
            line = file.read(256).split(b"\n")[0]
    except PermissionError:  # a script could not be run either: its interpreter would have to read it
        return ""
    words = line[2:].split(None, 1) if line.startswith(b"#!") else []
    return os.fsdecode(words[0]) if words else ""


def run(
    command: Sequence[str],
    user: str,
    timeout: float,
    leaves: bool = False,
    stops: Callable[[], bool] = lambda: False,
) -> tuple[int, bytes]:
    """Return exit status and output, standard output first. If it takes longer or prints too much, it is killed with
    all that it has started. Raises TimeoutExpired, TooMuchOutput and OSError.

    leaves: what it leaves in the background, with its output still open, is not waited for. stops: it is asked now and
    then, and ends the program as a timeout does.
    """
    pipe = subprocess.PIPE
    uid, gid, groups = _identity(user)
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=pipe,
        stderr=pipe,
        cwd="/",
        env=_environment(),
        start_new_session=True,
        user=uid,
        group=gid,
        extra_groups=groups,
    )
    with process:
        output, until = Output(process, MOST_BYTES), time.monotonic() + timeout
        try:
            while not _ends(output, max(0.0, until - time.monotonic())):
                if leaves and process.poll() is not None:
                    _ends(output, LOOK_SECONDS)  # its last words
                    break
                if stops() or time.monotonic() >= until:
                    raise subprocess.TimeoutExpired(command, timeout)
        except BaseException:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            raise  # the end of the block waits for it
        return process.returncode, b"\n".join(output.texts())


def _ends(output: Output, left: float) -> bool:
    """Read for a moment. Return whether the program has ended and nothing holds its output open."""
    try:
        output.read(min(left, LOOK_SECONDS))
    except subprocess.TimeoutExpired:
        return False
    return True


def _environment() -> Mapping[str, str]:
    return {"PATH": USUAL_PATH, "LC_ALL": "C"} | {name: os.environ[name] for name in ENVIRONMENT if name in os.environ}


def _identity(user: str) -> tuple[int | None, int | None, list[int] | None]:
    """Return the ids of a user, its group and all of its groups; None each if this process is that user's."""
    account = pwd.getpwnam(user) if user else None
    if account is None or account.pw_uid == os.geteuid():
        return None, None, None
    return account.pw_uid, account.pw_gid, os.getgrouplist(user, account.pw_gid)


def program_problem(name: str, given: str | HealthProgram, taken: Sequence[str]) -> str:
    """Describe the error in one program's line; empty if there is none. taken: names of Unicron's own checks."""
    if name in taken:
        return f"programs.{name}: this is a check of Unicron's own: give it another name"
    if not re.fullmatch(r"[A-Za-z0-9_.-]{1,40}", name) or name == "all":
        return f"programs.{name}: write a name of up to 40 letters, digits, '_', '.' or '-', such as nhc"
    program = as_program(given)
    try:
        command = shlex.split(program.command)
    except ValueError as error:
        return f"programs.{name}: {error}"
    if not command or not command[0].startswith("/"):
        return f'programs.{name} = "{program.command}": begin with the absolute path of a program'
    if both := set(program.bad or ()) & set(program.warning or ()):
        return f"programs.{name}: status {min(both)} is both bad and a warning"
    return ""
