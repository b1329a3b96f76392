"""Packs a bundle about a job for support.

It contains numbers, names and words that Unicron and Slurm choose. Texts of users are in it only with `--with-logs`,
because no search finds every secret in them. Questions and files are limited by the caller's rights.
"""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
import platform
import pwd
import re
import stat
import subprocess
import tarfile
import time
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import msgspec

from unicron_ctl.shared.log.records import KINDS
from unicron_ctl.shared.protocol import answer_schema
from unicron_ctl.shared.protocol.client import ask_controller
from unicron_ctl.shared.settings.config_file import load_valid_part
from unicron_ctl.shared.settings.notify import load_secrets
from unicron_ctl.shared.settings.places import program
from unicron_ctl.shared.system.errors import WRONG_USE, UserError
from unicron_ctl.shared.system.redaction import secret_values, without_values
from unicron_detector.words import plural

TAIL_BYTES = 64 << 10  # of each file of output
MOST_FILES = 64  # files of ranks, those with failures first
EVENTS = 5000  # the newest
DOCTOR_SECONDS, SLURM_SECONDS, ANSWER_SECONDS = 60.0, 10.0, 10.0
PACKAGES = "unicron-slurm torch megatron-core pyzmq msgspec msgpack numpy prometheus_client pyslurm".split()
TEXTS = frozenset(
    "action actions agent assignment auth bounds cause code detected_by event fault job kind kind_of_failure layout"
    " layouts metric metrics mode modes node node_names nodes partition partitions paused peer phase plan_reason"
    " planned planned_layout release rule scope shares slurm source spare_of spares start state states until used_by"
    " user verdict".split()
)
"""Fields of answers and records whose texts and keys no user writes. The texts of all others are left out."""
LEFT_OUT_SETTINGS = {"health": ["programs"], "notify": ["secrets"]}
"""Settings that may contain a secret: arguments of programs, and the path of the secrets."""
SQUEUE = "%i|%T|%r|%P|%q|%Q|%D|%N|%C|%m|%b|%l|%M|%S|%e"
"""Columns of `squeue -o` (man squeue) without users' words."""
_STRUCTS = [one for one in vars(answer_schema).values() if isinstance(one, type) and issubclass(one, msgspec.Struct)]
_FIELDS = frozenset(name for struct in (*_STRUCTS, *KINDS.values()) for name in struct.__struct_fields__)
"""All fields of answers and records. Other keys may be users' words."""


def without_users_words(data: Any, field: str = "") -> Any:
    """Return the part of an answer that a bundle may contain: numbers, and the texts in TEXTS."""
    if isinstance(data, str):
        return data if field in TEXTS else ""
    if isinstance(data, list):
        return [without_users_words(one, field) for one in data]
    if not isinstance(data, dict):
        return data
    allowed = {name: value for name, value in data.items() if name in _FIELDS or field in TEXTS}
    return {name: without_users_words(value, name if name in _FIELDS else field) for name, value in allowed.items()}


def pack(job: str, output: Path | None, with_logs: bool, controller: str | None) -> tuple[Path, list[str]]:
    """Write the bundle with mode 0600. Return its path, and what is not in it and why. Raises UserError."""
    left_out: list[str] = []
    members = dict(_collect(job, with_logs, controller, left_out))
    stamp = time.strftime("%Y%m%dT%H%M%S")
    name = f"unicron-{re.sub('[^A-Za-z0-9_.-]', '_', job)[:60]}-{stamp}"
    path = output or Path(f"{name}.tar.gz")
    members["README.txt"] = _readme(job, members, with_logs, left_out)
    secrets = _known_secrets()
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    except FileExistsError:
        raise UserError(f"{path} exists: name another file with -o", WRONG_USE) from None
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}: name another file with -o", WRONG_USE) from None
    with os.fdopen(descriptor, "wb") as file, tarfile.open(fileobj=file, mode="w:gz") as archive:
        for member, content in sorted(members.items()):
            _add(archive, f"{name}/{member}", without_values(_serialize(member, content), secrets))
    return path, left_out


def _serialize(member: str, content: Any) -> str:
    """Return a text as it is, and plain data as JSON."""
    if isinstance(content, str):
        return content
    if member.endswith(".jsonl"):
        return "".join(json.dumps(one) + "\n" for one in content)
    return json.dumps(content, indent=2) + "\n"


def _add(archive: tarfile.TarFile, name: str, text: str) -> None:
    data = text.encode(errors="replace")
    member = tarfile.TarInfo(name)
    member.size, member.mode, member.mtime = len(data), 0o600, time.time()
    archive.addfile(member, io.BytesIO(data))


def _readme(job: str, members: Mapping[str, Any], with_logs: bool, left_out: list[str]) -> str:
    contents = (
        "It holds the job's output and the words of its errors. Look through it before you send it."
        if with_logs
        else "Texts that users or their programs write are left out: --with-logs adds them."
    )
    lines = [
        f"About job {job}, made by `unicronctl report job` at {time.strftime('%Y-%m-%dT%H:%M:%S%z')}.",
        contents,
        "",
        *sorted(members),
        *(f"left out: {line}" for line in left_out),
    ]
    return "\n".join(lines) + "\n"


def _known_secrets() -> list[str]:
    """Return the known values of secrets, to remove them from all texts."""
    secrets = secret_values(os.environ)
    with contextlib.suppress(UserError):
        config, _ = load_valid_part()
        if config.notify.secrets and os.access(config.notify.secrets, os.R_OK):
            secrets += load_secrets(config.notify).words
    return secrets


def _collect(job: str, with_logs: bool, controller: str | None, left_out: list[str]) -> Iterator[tuple[str, Any]]:
    """Yield (member, text or plain data) for each part. Raises UserError if the controller refuses the job."""
    explained: dict[str, Any] = {}
    user = ""
    try:
        explained = ask_controller({"kind": "explain", "job": job}, controller)
    except UserError as error:
        if _answers(controller):
            raise  # there is no such job, or it is another user's
        left_out.append(f"what the controller knows: {error}")
    if explained:
        yield "explain.json", explained if with_logs else without_users_words(explained)
        for name, answer in _ask_about(explained["job"], controller, left_out):
            user = answer[0]["user"] if name == "job.json" and answer else user
            yield name, answer if with_logs else without_users_words(answer)
    number = str(explained.get("job", job))
    if number.isdecimal():
        yield from _slurm(number, with_logs, left_out)
    if with_logs:
        yield from _logs(explained, number, user, left_out)
    yield from _configuration(left_out)
    yield "versions.txt", _versions()
    yield from _doctor(left_out)


def _answers(controller: str | None) -> bool:
    try:
        ask_controller({"kind": "ping"}, controller)
    except UserError:
        return False
    return True


def _ask_about(job: str, controller: str | None, left_out: list[str]) -> Iterator[tuple[str, Any]]:
    """Yield the controller's other answers about the job."""

    def answer_to(kind: str, **more: Any) -> Any:
        return ask_controller({"kind": kind, **more}, controller, ANSWER_SECONDS)

    def has_job(node: dict[str, Any]) -> bool:
        return any(element.partition("_")[0] == job for element in node["used_by"])

    makers: dict[str, Callable[[], Any]] = {
        "events.jsonl": lambda: answer_to("events", job=job, limit=EVENTS),
        "job.json": lambda: [one for one in answer_to("jobs") if one["job"] == job],
        "nodes.json": lambda: list(filter(has_job, answer_to("nodes"))),
        "controller.json": lambda: answer_to("status")["controller"],
    }
    for name, make in makers.items():
        try:
            yield name, make()
        except UserError as error:
            left_out.append(f"{name}: {error}")


def _slurm(job: str, with_logs: bool, left_out: list[str]) -> Iterator[tuple[str, str]]:
    """Yield Slurm's data about the job. `scontrol` prints the user's words, too."""
    commands = {"slurm-queue.txt": ["squeue", "--local", "-t", "all", "-o", SQUEUE, "-j", job]}
    if with_logs:
        commands["slurm-job.txt"] = ["scontrol", "--local", "show", "job", job]
    for name, command in commands.items():
        text, error = _output(command, SLURM_SECONDS)
        if error:
            left_out.append(f"{command[0]}: {error}")
        else:
            yield name, text


def _logs(explained: Mapping[str, Any], job: str, user: str, left_out: list[str]) -> Iterator[tuple[str, str]]:
    """Yield the ends of the ranks' files and of the job's own output, if this user can read them. user: the owner."""
    folder = Path(explained.get("log_dir") or "/nonexistent")
    failed = [slot for failure in explained.get("failures", []) for slot in failure["slots"]]
    files = {int(found[1]): path for path in folder.glob("*") if (found := re.fullmatch(r"rank-(\d+)\.log", path.name))}
    order = dict.fromkeys([slot for slot in reversed(failed) if slot in files] + sorted(files))
    paths = {f"logs/rank-{rank}.log": files[rank] for rank in list(order)[:MOST_FILES]}
    shown, _ = _output(["scontrol", "--local", "show", "job", job], SLURM_SECONDS) if job.isdecimal() else ("", "")
    for number, path in enumerate(dict.fromkeys(re.findall(r"^\s*Std(?:Out|Err)=(.+?)\s*$", shown, re.MULTILINE))):
        paths[f"logs/job-{number}.log"] = Path(path)
    owner = _owner(user, job)
    for name, path in paths.items():
        try:
            yield name, _tail(path, owner)
        except OSError as error:
            left_out.append(f"{path}: {error.strerror}")
    if len(order) > MOST_FILES:
        left_out.append(f"the output of {plural(len(order) - MOST_FILES, 'rank')}")


def _owner(user: str, job: str) -> int | None:
    """Return the uid of the job's owner, None if it is not known. user: the owner's name, "" if it is not known."""
    with contextlib.suppress(KeyError):
        return pwd.getpwnam(user).pw_uid
    if not job.isdecimal():
        return None
    uid, *_ = _output(["squeue", "--local", "-h", "-o", "%U", "-j", job], SLURM_SECONDS)[0].split() or [""]
    return int(uid) if uid.isdecimal() else None


def _tail(path: Path, owner: int | None) -> str:
    """Read the last TAIL_BYTES of a plain file of the job's owner. Raises OSError.

    The job chooses the paths of its files. So a link must not bring a file of the reader into the bundle, and a device
    must not even be opened.
    """
    named = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        status = os.fstat(named)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "no plain file")
        if status.st_uid != owner and os.geteuid() != owner:
            raise OSError(errno.EPERM, "not a file of the job's owner")
        descriptor = os.open(f"/proc/self/fd/{named}", os.O_RDONLY | os.O_CLOEXEC)
    finally:
        os.close(named)
    with os.fdopen(descriptor, "rb") as file:
        file.seek(max(0, status.st_size - TAIL_BYTES))
        return file.read(TAIL_BYTES).decode(errors="replace")


def _configuration(left_out: list[str]) -> Iterator[tuple[str, Any]]:
    """Yield all valid settings, including defaults."""
    try:
        config, _ = load_valid_part()
    except UserError as error:
        left_out.append(f"configuration.json: {error}")
        return
    settings = msgspec.to_builtins(config)
    for section, names in LEFT_OUT_SETTINGS.items():
        for name in names:
            del settings[section][name]
    yield "configuration.json", settings


def _versions() -> str:
    """List the releases of this machine and its packages."""
    lines = [f"python {platform.python_version()}", f"system {platform.platform()}"]
    for name in PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            lines.append(f"{name} {version(name)}")
    release, error = _output(["sinfo", "--version"], SLURM_SECONDS)
    return "\n".join([*lines, f"slurm: {error or release.strip()}"]) + "\n"


def _doctor(left_out: list[str]) -> Iterator[tuple[str, str]]:
    """Yield the output of `unicronctl doctor`."""
    text, error = _output([*program("unicronctl", "unicron_ctl.cli.unicronctl"), "doctor"], DOCTOR_SECONDS)
    if text:
        yield "doctor.txt", text
    elif error:
        left_out.append(f"doctor: {error}")


def _output(command: list[str], seconds: float) -> tuple[str, str]:
    """Return the output of a program, and why it could not be run or failed, or ""."""
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=seconds, check=False, errors="replace"
        )
    except subprocess.TimeoutExpired:
        return "", f"no answer within {seconds:.0f} s"
    except OSError as error:
        return "", f"{command[0]}: {error.strerror}"
    return done.stdout, "" if done.returncode == 0 else f"exit status {done.returncode}: {done.stderr.strip()[:200]}"
