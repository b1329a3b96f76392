"""A bundle about a job for support: what the asker may see, without what looks like a secret.

It asks as whoever calls it, and reads files with that user's rights. Each text goes through `system.redaction`.
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
from collections.abc import Callable, Collection, Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from unicron_ctl.shared.protocol.client import ask_controller
from unicron_ctl.shared.settings.config_file import search_path, understood
from unicron_ctl.shared.settings.notify import load_secrets
from unicron_ctl.shared.settings.places import program
from unicron_ctl.shared.system.errors import WRONG_USE, UserError
from unicron_ctl.shared.system.redaction import redacted, secret_values, without_secrets
from unicron_detector.words import counted

TAIL_BYTES = 64 << 10  # of each file of output
MOST_FILES = 64  # ranks whose output is in it, those with failures first
EVENTS = 5000  # the newest ones
DOCTOR_SECONDS, SLURM_SECONDS, ANSWER_SECONDS = 60.0, 10.0, 10.0
PACKAGES = (
    "unicron-slurm",
    "torch",
    "megatron-core",
    "pyzmq",
    "msgspec",
    "msgpack",
    "numpy",
    "prometheus_client",
    "pyslurm",
)


def pack(job: str, output: Path | None, with_logs: bool, controller: str | None) -> tuple[Path, list[str]]:
    """Writes the bundle, mode 0600. Returns its path, and what is not in it and why. Raises UserError."""
    left_out: list[str] = []
    texts = dict(_collected(job, with_logs, controller, left_out))
    known = _known_secrets()
    stamp = time.strftime("%Y%m%dT%H%M%S")
    name = f"unicron-{re.sub('[^A-Za-z0-9_.-]', '_', job)[:60]}-{stamp}"
    path = output or Path(f"{name}.tar.gz")
    texts["README.txt"] = _readme(job, texts, left_out)
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    except FileExistsError:
        raise UserError(f"{path} exists: name another file with -o", WRONG_USE) from None
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}: name another file with -o", WRONG_USE) from None
    with os.fdopen(descriptor, "wb") as file, tarfile.open(fileobj=file, mode="w:gz") as archive:
        for member, text in sorted(texts.items()):
            _add(archive, f"{name}/{member}", _written(member, text, known))
    return path, left_out


def _written(member: str, said: Any, known: Collection[str]) -> str:
    """A text, or plain data as JSON, without secrets: in JSON they would be quoted, and look otherwise."""
    if isinstance(said, str):
        return without_secrets(said, known)
    data = redacted(said, known)
    if member.endswith(".jsonl"):
        return "".join(json.dumps(one) + "\n" for one in data)
    return json.dumps(data, indent=2) + "\n"


def _add(archive: tarfile.TarFile, name: str, text: str) -> None:
    data = text.encode(errors="replace")
    member = tarfile.TarInfo(name)
    member.size, member.mode, member.mtime = len(data), 0o600, time.time()
    archive.addfile(member, io.BytesIO(data))


def _readme(job: str, texts: Mapping[str, Any], left_out: list[str]) -> str:
    lines = [
        f"About job {job}, made by `unicronctl report job` at {time.strftime('%Y-%m-%dT%H:%M:%S%z')}.",
        "What looks like a secret was replaced by ***. Look through it before you send it.",
        "",
        *sorted(texts),
        *(f"left out: {line}" for line in left_out),
    ]
    return "\n".join(lines) + "\n"


def _known_secrets() -> list[str]:
    """Secrets whose values are known here, if only to be looked for."""
    found = secret_values(os.environ)
    with contextlib.suppress(UserError):
        config, _ = understood()
        if config.notify.secrets and os.access(config.notify.secrets, os.R_OK):
            found += load_secrets(config.notify).words
    return found


def _collected(job: str, with_logs: bool, controller: str | None, left_out: list[str]) -> Iterator[tuple[str, Any]]:
    """(member, text or plain data) of all that there is. Raises UserError if the controller refuses it."""
    explained: dict[str, Any] = {}
    user = ""
    try:
        explained = ask_controller({"kind": "explain", "job": job}, controller)
    except UserError as error:
        if _answers(controller):
            raise  # it has answered: there is no such job, or it is not the asker's
        left_out.append(f"what the controller knows: {error}")
    if explained:
        yield "explain.json", explained
        for name, said in _answered(explained["job"], controller, left_out):
            user = said[0]["user"] if name == "job.json" and said else user
            yield name, said
    number = str(explained.get("job", job))
    yield from _slurm(number, left_out)
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


def _answered(job: str, controller: str | None, left_out: list[str]) -> Iterator[tuple[str, Any]]:
    """What else the controller says of the job, to this asker."""

    def answer_to(kind: str, **more: Any) -> Any:
        return ask_controller({"kind": kind, **more}, controller, ANSWER_SECONDS)

    makers: dict[str, Callable[[], Any]] = {
        "events.jsonl": lambda: answer_to("events", job=job, limit=EVENTS),
        "job.json": lambda: [one for one in answer_to("jobs") if one["job"] == job],
        "nodes.json": lambda: [node for node in answer_to("nodes") if _of(job, node["used_by"])],
        "controller.json": lambda: answer_to("status")["controller"],
    }
    for name, make in makers.items():
        try:
            yield name, make()
        except UserError as error:
            left_out.append(f"{name}: {error}")


def _of(job: str, elements: list[str]) -> bool:
    return any(element.partition("_")[0] == job for element in elements)


def _slurm(job: str, left_out: list[str]) -> Iterator[tuple[str, str]]:
    """What Slurm shows this user of the job."""
    if not job.isdecimal():
        return
    said, error = _output(["scontrol", "--local", "show", "job", job], SLURM_SECONDS)
    if error:
        left_out.append(f"scontrol show job {job}: {error}")
    else:
        yield "slurm-job.txt", said


def _logs(explained: Mapping[str, Any], job: str, user: str, left_out: list[str]) -> Iterator[tuple[str, str]]:
    """The ends of the ranks' files and of the job's own output, as far as this user can read them. user: the owner."""
    folder = Path(explained.get("log_dir") or "/nonexistent")
    failed = [slot for failure in explained.get("failures", []) for slot in failure["slots"]]
    files = {int(found[1]): path for path in _listed(folder) if (found := re.fullmatch(r"rank-(\d+)\.log", path.name))}
    order = dict.fromkeys([slot for slot in reversed(failed) if slot in files] + sorted(files))
    paths = {f"logs/rank-{rank}.log": files[rank] for rank in list(order)[:MOST_FILES]}
    said, _ = _output(["scontrol", "--local", "show", "job", job], SLURM_SECONDS) if job.isdecimal() else ("", "")
    for number, path in enumerate(dict.fromkeys(re.findall(r"^\s*Std(?:Out|Err)=(.+?)\s*$", said, re.MULTILINE))):
        paths[f"logs/job-{number}.log"] = Path(path)
    owner = _owner(user, job)
    for name, path in paths.items():
        try:
            yield name, _tail(path, owner)
        except OSError as error:
            left_out.append(f"{path}: {error.strerror}")
    if len(order) > MOST_FILES:
        left_out.append(f"the output of {counted(len(order) - MOST_FILES, 'rank')}")


def _listed(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


def _owner(user: str, job: str) -> int | None:
    """The uid of the job's owner; None where nobody says. user: as the controller says, "" while it does not answer."""
    with contextlib.suppress(KeyError):
        return pwd.getpwnam(user).pw_uid
    said = (
        _output(["squeue", "--local", "-h", "-o", "%U", "-j", job], SLURM_SECONDS)[0].split() if job.isdecimal() else []
    )
    return int(said[0]) if said and said[0].isdecimal() else None


def _tail(path: Path, owner: int | None) -> str:
    """The last TAIL_BYTES of a plain file of the job's owner. Raises OSError.

    The job says where its files are: a link there must not bring what is its reader's into the bundle, and a device
    must not even be opened.
    """
    named = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        found = os.fstat(named)
        if not stat.S_ISREG(found.st_mode):
            raise OSError(errno.EINVAL, "no plain file")
        if found.st_uid != owner and os.geteuid() != owner:
            raise OSError(errno.EPERM, "not a file of the job's owner")
        descriptor = os.open(f"/proc/self/fd/{named}", os.O_RDONLY | os.O_CLOEXEC)
    finally:
        os.close(named)
    with os.fdopen(descriptor, "rb") as file:
        size = found.st_size
        file.seek(max(0, size - TAIL_BYTES))
        text = file.read(TAIL_BYTES).decode(errors="replace")
    # A line without its beginning may be a secret without its name.
    return re.sub(r"\A[^\r\n]*[\r\n]+", "", text) if size > TAIL_BYTES else text


def _configuration(left_out: list[str]) -> Iterator[tuple[str, str]]:
    path = next((path for path in search_path() if path.is_file()), None)
    if path is None:
        left_out.append("unicron.toml: this machine has none")
        return
    try:
        yield "unicron.toml", path.read_text(errors="replace")
    except OSError as error:
        left_out.append(f"{path}: {error.strerror}")


def _versions() -> str:
    """Lists the releases of this machine and its packages."""
    lines = [f"python {platform.python_version()}", f"system {platform.platform()}"]
    for name in PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            lines.append(f"{name} {version(name)}")
    said, error = _output(["sinfo", "--version"], SLURM_SECONDS)
    return "\n".join([*lines, f"slurm: {error or said.strip()}"]) + "\n"


def _doctor(left_out: list[str]) -> Iterator[tuple[str, str]]:
    """What `unicronctl doctor` prints."""
    said, error = _output([*program("unicronctl", "unicron_ctl.cli.unicronctl"), "doctor"], DOCTOR_SECONDS)
    if said:
        yield "doctor.txt", said
    elif error:
        left_out.append(f"doctor: {error}")


def _output(command: list[str], seconds: float) -> tuple[str, str]:
    """What a program prints, and why it could not be run, or failed."""
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=seconds, check=False, errors="replace"
        )
    except subprocess.TimeoutExpired:
        return "", f"no answer within {seconds:.0f} s"
    except OSError as error:
        return "", f"{command[0]}: {error.strerror}"
    return done.stdout, "" if done.returncode == 0 else f"exit status {done.returncode}: {done.stderr.strip()[:200]}"
