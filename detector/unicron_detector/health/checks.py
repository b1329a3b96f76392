"""The checks, and an admin's settings for them. GPUs through nvidia-smi.

"bad" means that the node's hardware is proven bad and the node must not get a job: a Prolog that says so drains it.
What another node might see as well (a full or stale file system), or software can mend, is a "warning". A check without
an answer is "unknown", never "good" and never "bad".
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import re
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Annotated

import msgspec

from unicron_detector.failures.classify import Classifier, default_classifier
from unicron_detector.failures.severity import SeverityTableError
from unicron_detector.health import kernel_check
from unicron_detector.health.findings import BAD, GOOD, UNKNOWN, WARNING, Finding
from unicron_detector.health.program_output import TooMuchOutput, run_program
from unicron_detector.health.programs import HealthProgram, check_program
from unicron_detector.words import plural


class HealthConfig(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """The section [health] of unicron.toml: what a node must have. By default nothing is expected."""

    skip: tuple[str, ...] = ()
    """Checks that are switched off: gpu, memory, nic, file_system, shm, clock, kernel, a name of `programs`, or all."""
    timeout: Annotated[float, msgspec.Meta(gt=0, le=50)] = 5.0
    """Seconds for each check."""
    gpus: Annotated[int, msgspec.Meta(ge=0)] | None = None
    """The number of GPUs that there must be."""
    memory_mb: Annotated[int, msgspec.Meta(ge=0)] | None = None
    """RealMemory of slurm.conf."""
    nics: tuple[str, ...] = ()
    """Interfaces and InfiniBand devices that must be up, such as "ib0" and "mlx5_0"."""
    paths: tuple[str, ...] = ("/tmp",)
    """Folders that must be writable."""
    slow_seconds: Annotated[float, msgspec.Meta(gt=0)] = 2.0
    """A file system that takes longer causes a warning."""
    clock_warn: Annotated[float, msgspec.Meta(gt=0)] = 1.0
    """Seconds by which a host's clock may differ from the controller's before `unicronctl doctor` warns."""
    shm_mb: Annotated[int, msgspec.Meta(ge=0)] = 64
    """The least free shared memory."""
    test_mb: Annotated[int, msgspec.Meta(ge=0)] = 16
    """The memory that is written and read back."""
    kernel_state: str = "/var/lib/unicron/health"
    """A folder that only root can write, for the state of the kernel log's check."""
    programs: dict[str, str | HealthProgram] = {}
    """Checks of others: name = "/path/of/program arguments" (docs/health-checks.md)."""


class Settings(HealthConfig, kw_only=True, frozen=True):
    """Settings of the checks."""

    severity: Mapping[str, object] = {}
    """[severity] of unicron.toml: the admin's own rules."""
    root: str = "/"
    """The folder that has proc, sys and dev; tests put their own tree there."""


def _worst(findings: list[Finding], fine: str) -> Finding:
    order = (BAD, WARNING, UNKNOWN, GOOD)
    verdict = min((finding.verdict for finding in findings), key=order.index, default=GOOD)
    reasons = [finding.reason for finding in findings if finding.verdict == verdict and finding.reason]
    values = {key: value for finding in findings for key, value in finding.values.items()}
    return Finding(verdict, "; ".join(reasons) if verdict != GOOD else fine, values)


def _root(settings: Settings, *parts: str) -> Path:
    return Path(settings.root, *parts)


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except (OSError, ValueError):
        return ""


# ------------------------------------------------------------------------------------------------------------- gpu

_SMI_FIELDS = (
    "index",
    "ecc.errors.uncorrected.volatile.total",
    "remapped_rows.failure",
    "remapped_rows.pending",
    "retired_pages.pending",
    "temperature.gpu",
)


def check_gpu(settings: Settings, run: Callable[..., subprocess.CompletedProcess[bytes]] = run_program) -> Finding:
    """Check that all expected GPUs answer, without failed row remapping and pending uncorrectable errors."""
    present = len(list(_root(settings, "proc/driver/nvidia/gpus").glob("*")))
    if not present and not settings.gpus:
        return Finding(GOOD, "no GPU here and none expected", {"gpus": 0})
    if shutil.which("nvidia-smi") is None and run is run_program:
        if settings.gpus and not present:
            return Finding(BAD, f"{plural(settings.gpus, 'GPU')} expected, the driver shows none", {"gpus": 0})
        return Finding(UNKNOWN, "nvidia-smi is not installed, so the GPUs cannot be asked", {"gpus": present})
    command = ["nvidia-smi", f"--query-gpu={','.join(_SMI_FIELDS)}", "--format=csv,noheader,nounits"]
    try:
        done = run(command, timeout=max(0.5, settings.timeout * 0.9))
    except subprocess.TimeoutExpired:
        return Finding(UNKNOWN, "nvidia-smi does not answer", {"gpus": present})
    except TooMuchOutput as error:
        return Finding(UNKNOWN, f"nvidia-smi: {error}", {"gpus": present})
    except OSError as error:
        return Finding(UNKNOWN, f"nvidia-smi cannot be started: {error.strerror}", {"gpus": present})
    out, err = (text.decode(errors="replace") for text in (done.stdout, done.stderr))
    return judge_gpus(done.returncode, out, (out + err).strip(), settings)


def judge_gpus(status: int, table: str, output: str, settings: Settings) -> Finding:
    """Return the verdict on nvidia-smi's answer (``_SMI_FIELDS`` as CSV, one line per GPU). Pure."""
    if status != 0:
        # 9: the driver is not loaded, 15: a GPU is lost (nvidia-smi(1), RETURN VALUE).
        verdict = default_classifier().match(output)
        lost = status == 15 or (verdict is not None and verdict.cause == "gpu_lost")
        line = output.splitlines()[-1] if output else f"exit status {status}"
        return Finding(BAD if lost else UNKNOWN, f"nvidia-smi: {line}", {"status": status})
    rows = [[cell.strip() for cell in line.split(",")] for line in table.splitlines() if line.strip()]
    findings = [_judge_gpu(dict(zip(_SMI_FIELDS, row, strict=False))) for row in rows]
    if settings.gpus and len(rows) < settings.gpus:
        findings.append(Finding(BAD, f"{plural(settings.gpus, 'GPU')} expected, {len(rows)} answer"))
    findings.append(Finding(GOOD, "", {"gpus": len(rows)}))
    return _worst(findings, f"{plural(len(rows), 'GPU')} answer{'s' * (len(rows) == 1)}")


def _judge_gpu(row: dict[str, str]) -> Finding:
    name = f"GPU {row.get('index', '?')}"
    if row.get("remapped_rows.failure", "").lower() in ("1", "yes"):
        return Finding(BAD, f"{name}: a memory row could not be remapped (Xid 64)")
    uncorrected = row.get("ecc.errors.uncorrected.volatile.total", "")
    pending = {row.get(key, "").lower() for key in ("remapped_rows.pending", "retired_pages.pending")} & {"1", "yes"}
    if pending:
        return Finding(WARNING, f"{name}: memory waits to be retired, reset the GPU when the node is idle")
    if uncorrected.isdecimal() and int(uncorrected) > 0:
        return Finding(WARNING, f"{name}: {uncorrected} uncorrectable memory errors since the driver was loaded")
    return Finding(GOOD, "")


# ---------------------------------------------------------------------------------------------------------- memory


def check_memory(settings: Settings) -> Finding:
    """Check that all memory is there, no uncorrectable error was counted, and a pattern reads back as written."""
    findings = []
    size = re.search(r"MemTotal:\s*(\d+)", _text(_root(settings, "proc/meminfo")))
    total = int(size[1]) // 1024 if size else None
    if total is None:
        findings.append(Finding(UNKNOWN, "/proc/meminfo cannot be read"))
    elif settings.memory_mb and total < 0.9 * settings.memory_mb:
        findings.append(Finding(BAD, f"{total} MB of memory where {settings.memory_mb} MB are expected"))
    for path in sorted(_root(settings, "sys/devices/system/edac/mc").glob("mc*/ue_count")):
        count = _text(path)
        if count.isdecimal() and int(count):
            findings.append(Finding(BAD, f"memory controller {path.parent.name}: {count} uncorrectable errors (EDAC)"))
    findings.append(_pattern(settings.test_mb))
    if total is not None:
        findings.append(Finding(GOOD, "", {"memory_mb": total}))
    return _worst(findings, f"{total} MB")


def _pattern(megabytes: int) -> Finding:
    for byte in (0x55, 0xAA):
        block = bytearray([byte]) * (megabytes << 20)
        if block.count(byte) != len(block):
            return Finding(BAD, f"memory does not hold the pattern 0x{byte:02x}")
    return Finding(GOOD, "")


# ------------------------------------------------------------------------------------------------------------- nic


def check_nic(settings: Settings) -> Finding:
    """Check that the interfaces and InfiniBand devices that the admin named are there and up."""
    findings = [_judge_nic(name, settings) for name in settings.nics]
    if settings.nics:
        return _worst(findings, f"{', '.join(settings.nics)} up")
    up = [path.parent.name for path in _root(settings, "sys/class/net").glob("*/operstate") if _text(path) == "up"]
    return Finding(
        GOOD if up else UNKNOWN, f"up: {', '.join(sorted(up)) or 'no interface says so'}", {"up": sorted(up)}
    )


def _judge_nic(name: str, settings: Settings) -> Finding:
    device = _root(settings, "sys/class/infiniband", name)
    if device.exists():
        states = {path.parent.name: _text(path) for path in sorted(device.glob("ports/*/state"))}
        down = [port for port, state in states.items() if "ACTIVE" not in state]
        if down:
            return Finding(BAD, f"{name}: port {down[0]} is {states[down[0]] or 'silent'}", {name: "down"})
        return Finding(GOOD, "", {name: "up"})
    interface = _root(settings, "sys/class/net", name)
    if not interface.exists():
        return Finding(BAD, f"{name}: the kernel does not know this interface", {name: "missing"})
    state = _text(interface / "operstate")
    if state == "down" or _text(interface / "carrier") == "0":
        return Finding(BAD, f"{name}: no link", {name: "down"})
    return Finding(GOOD if state == "up" else UNKNOWN, f"{name}: state {state or 'unknown'}", {name: state})


# ----------------------------------------------------------------------------------------- file system, shared memory

_DEVICE_ERRORS = {errno.EIO, errno.EROFS}


def check_file_system(settings: Settings) -> Finding:
    """Check that each path takes a file, keeps it, and does so in time."""
    return _worst([_try_path(Path(path), settings) for path in settings.paths], f"{', '.join(settings.paths)} writable")


def _try_path(path: Path, settings: Settings, size: int = 1 << 16) -> Finding:
    content = os.urandom(size)
    start = time.perf_counter()
    try:
        # Without a name if the file system can do that, otherwise with a secret one: users write there, too.
        with tempfile.TemporaryFile(dir=path, prefix=".unicron-health-", buffering=0) as file:
            file.write(content)
            os.fsync(file.fileno())
            file.seek(0)
            same = file.read() == content
    except OSError as error:
        broken = error.errno in _DEVICE_ERRORS and _is_local(path, settings)
        return Finding(BAD if broken else WARNING, f"{path}: {error.strerror or error}", {str(path): error.errno})
    seconds = time.perf_counter() - start
    if not same:
        return Finding(BAD, f"{path}: a file reads back other than it was written")
    if seconds > settings.slow_seconds:
        return Finding(WARNING, f"{path}: {seconds:.1f} s for one small file", {str(path): round(seconds, 4)})
    return Finding(GOOD, "", {str(path): round(seconds, 4)})


_REMOTE = ("nfs", "lustre", "gpfs", "ceph", "beegfs", "cifs", "9p", "fuse", "wekafs", "afs")


def _is_local(path: Path, settings: Settings) -> bool:
    """Whether the path is on a disk of this node: an error of a shared file system proves nothing about the node."""
    best, kind = "", ""
    for line in _text(_root(settings, "proc/mounts")).splitlines():
        fields = line.split()
        if len(fields) > 2 and (str(path) + "/").startswith(fields[1].rstrip("/") + "/") and len(fields[1]) > len(best):
            best, kind = fields[1], fields[2]
    return bool(kind) and not kind.startswith(_REMOTE)


def check_shm(settings: Settings) -> Finding:
    """Check that shared memory is there, writable and not full of what dead jobs left behind."""
    path = _root(settings, "dev/shm")
    try:
        free = os.statvfs(path).f_bavail * os.statvfs(path).f_frsize >> 20
    except OSError as error:
        return Finding(WARNING, f"/dev/shm: {error.strerror}")
    written = _try_path(path, settings, 1 << 12)
    if written.verdict != GOOD:
        return Finding(WARNING, written.reason, {"free_mb": free})
    if free < settings.shm_mb:
        reason = f"/dev/shm: {free} MB free, {settings.shm_mb} MB wanted; remove what dead jobs left"
        return Finding(WARNING, reason, {"free_mb": free})
    return Finding(GOOD, f"{free} MB free", {"free_mb": free})


# ----------------------------------------------------------------------------------------------------------- clock


def check_clock(settings: Settings) -> Finding:
    """Check that the clock runs, and is kept by a time service."""
    wall, mono = time.time(), time.monotonic()
    time.sleep(0.05)
    ran, should = time.time() - wall, time.monotonic() - mono
    if abs(ran - should) > 0.5:
        return Finding(WARNING, f"the clock moved {ran:.2f} s in {should:.2f} s: it is being set", {})
    kept = _is_clock_synchronised()
    if kept is False:
        return Finding(WARNING, "no time service keeps this clock", {"synchronised": False})
    return Finding(GOOD, "kept by a time service" if kept else "runs", {"synchronised": kept})


def _is_clock_synchronised() -> bool | None:
    """Whether the kernel's clock is disciplined (adjtimex(2), STA_UNSYNC); None if it cannot be asked."""
    with contextlib.suppress(OSError, AttributeError):
        library = ctypes.CDLL(None, use_errno=True)
        buffer = (ctypes.c_char * 512)()
        state: int = library.adjtimex(ctypes.byref(buffer))
        if state >= 0:
            return state != 5  # TIME_ERROR: not synchronised
    return None


# ---------------------------------------------------------------------------------------------------------- kernel


def check_kernel(settings: Settings) -> Finding:
    """Check that the kernel has not called the hardware broken. If it did, that counts until the node is booted or the
    admin removes the file that remembers it."""
    node = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
    state = Path(settings.kernel_state, f"kernel-{node}.json")
    try:
        boot = _root(settings, "proc/sys/kernel/random/boot_id").read_text().strip()
        bad = kernel_check.check_kernel_log(_root(settings, "dev/kmsg"), boot, state, lambda: _rules(settings))
    except OSError as error:
        return Finding(WARNING, f"the kernel log is not read: {error.filename or 'kmsg'}: {error.strerror}")
    except SeverityTableError as error:
        return Finding(WARNING, f"the kernel log is not read: {error}")
    if bad:
        return Finding(BAD, f"{'; '.join(bad)} (until a reboot, or `rm {state}`)", {"lines": bad})
    return Finding(GOOD, "the kernel has not called the hardware broken")


def _rules(settings: Settings) -> Classifier:
    rules = default_classifier()
    return rules.load({"severity": settings.severity}) if settings.severity else rules


CHECKS: dict[str, Callable[[Settings], Finding]] = {
    "gpu": check_gpu,
    "memory": check_memory,
    "nic": check_nic,
    "file_system": check_file_system,
    "shm": check_shm,
    "clock": check_clock,
    "kernel": check_kernel,
}


def checks_of(settings: HealthConfig, at_prolog: bool = False) -> dict[str, Callable[[Settings], Finding]]:
    """Return a node's checks by name: Unicron's own, and the programs of others for this occasion."""
    return CHECKS | {
        name: partial(_check_program, name, given)
        for name, given in settings.programs.items()
        if not at_prolog or (isinstance(given, HealthProgram) and given.prolog)
    }


def _check_program(name: str, given: str | HealthProgram, settings: Settings) -> Finding:
    return check_program(name, given, settings.timeout)
