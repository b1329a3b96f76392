"""Unicron on one card: a table of checks, made in under nine minutes (docs/gpu.md). The cost of a step, the
templates and, with --nccl, the other way of NCCL are made with --only.

    python -m benchmarks.gpu [--device cuda|cpu] [--nccl LIBRARY] [--only NAME]... [--seconds 520] [--out FOLDER]

Without a card it is a dry run: the same programs with small models and gloo on the CPU. --nccl: a libnccl.so.2 of 2.30
or later, which allows several ranks on one card. Each check is a process of its own with a time limit; a check that
fails or hangs does not stop the others. FOLDER gets rows.jsonl, a JSON line for each row, and log.txt.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import select
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field, replace
from importlib import metadata
from pathlib import Path
from typing import IO, Any

import psutil

from benchmarks.gpu import rows
from unicron_detector.processes.supervise import adopt_orphans

# Read in NCCL's sources: several ranks on one card are allowed so, without NVLS and with few channels.
ONE_CARD = {
    "NCCL_MULTI_RANK_GPU_ENABLE": "1",
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_MAX_CTAS": "2",
    "NCCL_ALGO": "RING",
    "NCCL_DEBUG": "WARN",
}
# Ranks that take each other for other hosts' reach each other through sockets.
APART = {
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_IB_DISABLE": "1",
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_MAX_CTAS": "2",
    "NCCL_DEBUG": "WARN",
}

# Seconds for a communicator to be made: torch's own limit is 30 minutes, and nothing else ends it.
QUICK = {"TORCH_NCCL_NONBLOCKING_TIMEOUT": "6"}


@dataclass(frozen=True)
class Check:
    """One line of the table, or several. number: of the check in docs/gpu.md. limit: seconds."""

    name: str
    number: int
    words: tuple[str, ...]
    limit: float
    environment: dict[str, str] = field(default_factory=dict)
    asked: bool = False  # made where it is named alone


OF_ALL = (
    Check("errors", 5, ("errors",), 90),
    Check("health", 6, ("health",), 40),
    Check("snapshots", 4, ("snapshots",), 150),
    Check("cost", 6, ("cost",), 120, asked=True),
)


def checks(device: str, library: str | None) -> list[Check]:
    """In the order in which they are made."""
    preload = {"LD_PRELOAD": library} if library else {}
    found = [Check("alone", 1, ("alone",), 70)]
    if device == "cpu":
        found += [Check("aborted", 3, ("aborted", "gloo"), 90), Check("heal-gloo", 2, ("heal", "gloo", "faults"), 200)]
        found += [Check("layouts-gloo", 3, ("heal", "gloo", "layouts"), 120)]
        found += [Check("agents-gloo", 3, ("agents", "gloo"), 90)]
        found += [Check("templates-gloo", 3, ("templates", "gloo"), 170, asked=True)]
        return [*found, *OF_ALL]
    # NCCL comes in one of two ways. Nine minutes are enough for one.
    shared = [
        Check("aborted", 3, ("aborted", "nccl"), 100, ONE_CARD | QUICK | preload),
        Check("heal", 3, ("heal", "nccl", "faults"), 200, ONE_CARD | preload),
        Check("layouts", 3, ("heal", "nccl", "layouts"), 150, ONE_CARD | preload),
        Check("agents", 3, ("agents", "nccl"), 90, ONE_CARD | preload),
    ]
    apart = [
        Check("aborted-apart", 3, ("aborted", "apart"), 100, APART | QUICK),
        Check("heal-apart", 3, ("heal", "apart", "faults"), 200, APART),
        Check("layouts-apart", 3, ("heal", "apart", "layouts"), 150, APART),
        Check("agents-apart", 3, ("agents", "apart"), 90, APART),
    ]
    first, last = (shared, [replace(each, asked=True) for each in apart]) if library else (apart, [])
    last.append(Check("templates-apart", 3, ("templates", "apart"), 170, APART, asked=True))
    return [*found, *first, Check("heal-gloo", 2, ("heal", "gloo", "faults"), 150), *OF_ALL, *last]


class Table:
    """Prints rows as they come, and keeps them."""

    def __init__(self, folder: Path | None):
        self.failed = 0
        self.began = time.monotonic()
        self.file: IO[str] | None = None
        self.log: IO[bytes] | None = None
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            self.file, self.log = (folder / "rows.jsonl").open("w"), (folder / "log.txt").open("wb")

    def add(self, check: Check, what: str, saw: str, ok: bool, figures: dict[str, Any]) -> None:
        self.failed += not ok
        at = time.monotonic() - self.began
        print(f"{at:5.0f} s  {check.number}  {'ok    ' if ok else 'FAILED'}  {what}: {saw}"[:1800], flush=True)
        if self.file is not None:
            row = {"check": check.number, "name": check.name, "what": what, "saw": saw, "ok": ok, "at": round(at, 1)}
            self.file.write(json.dumps({**row, **figures}, default=str) + "\n")
            self.file.flush()

    def said(self, check: Check, line: bytes) -> None:
        """A line of output of a check: a row, or for the log."""
        found = rows.parsed(line.decode(errors="replace"))
        if found is not None:
            self.add(check, *found)
        elif self.log is not None:
            self.log.write(line)
            self.log.flush()


def run(check: Check, table: Table, limit: float) -> None:
    """A check to its end, or to its limit."""
    words = [sys.executable, "-m", f"benchmarks.gpu.{check.words[0]}", *check.words[1:]]
    environment = os.environ | check.environment
    if table.log is not None:
        table.log.write(f"======== {check.name}\n".encode())
        table.log.flush()
    errors = table.log if table.log is not None else None
    process = subprocess.Popen(words, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors)
    assert process.stdout is not None
    deadline, rest = time.monotonic() + limit, b""
    while (left := deadline - time.monotonic()) > 0:
        if not select.select([process.stdout], [], [], left)[0]:
            continue
        data = os.read(process.stdout.fileno(), 1 << 16)
        if not data:
            break
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            table.said(check, line + b"\n")
    hung = process.poll() is None and time.monotonic() >= deadline
    end_all()
    try:
        code = process.wait(10)
    except subprocess.TimeoutExpired:
        code = -signal.SIGKILL  # it is in the driver
    if hung:
        table.add(check, check.name, f"not over after {limit:.0f} s, ended", False, {})
    elif code:
        table.add(check, check.name, f"ended with {code}", False, {})


def end_all() -> None:
    """No process of a check is left, whoever was its parent: this one adopts them."""
    deadline = time.monotonic() + 10
    while (left := psutil.Process().children(recursive=True)) and time.monotonic() < deadline:
        for process in left:
            try:
                process.send_signal(signal.SIGKILL)
            except psutil.NoSuchProcess:
                continue
        psutil.wait_procs(left, 1)


# torch.cuda.nccl.version() is what torch was built with.
LOADED = """
import ctypes, torch
number = ctypes.c_int()
ctypes.CDLL("libnccl.so.2").ncclGetVersion(ctypes.byref(number))
print(torch.version.cuda, number.value)
"""


def asked_of_torch(library: str | None) -> str:
    """The versions of CUDA and of the NCCL that is loaded."""
    environment = os.environ | ({"LD_PRELOAD": library} if library else {})
    command = [sys.executable, "-c", LOADED]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    return done.stdout.strip() or done.stderr[-200:]


def versions(device: str, library: str | None) -> tuple[str, dict[str, Any]]:
    """Return what this machine is."""
    found = {"python": platform.python_version(), "kernel": platform.release(), "cores": os.cpu_count()}
    for name in ("torch", "megatron-core", "numpy", "pyzmq", "msgspec"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "none"
    shared = os.statvfs("/dev/shm")
    found["shared memory"] = f"{shared.f_bavail * shared.f_frsize / 1e9:.0f} GB"
    if device == "cuda":
        query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
        asked = subprocess.run(query, capture_output=True, text=True, timeout=30, check=False)
        found["card"] = asked.stdout.strip()
        found["CUDA, NCCL"] = asked_of_torch(None)
        if library:
            found["NCCL of several ranks on a card"] = asked_of_torch(library).split()[-1]
    return ", ".join(f"{name} {value}" for name, value in found.items()), found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), help="by default what there is")
    parser.add_argument("--nccl", metavar="LIBRARY", help="libnccl.so.2 of 2.30 or later")
    parser.add_argument("--only", action="append", metavar="NAME", help="this check; may be given again; in this order")
    parser.add_argument("--seconds", type=float, default=520.0, help="for all of it; a dry run may take six times that")
    parser.add_argument("--out", type=Path, metavar="FOLDER")
    options = parser.parse_args()
    device = options.device or ("cuda" if Path("/dev/nvidiactl").exists() else "cpu")
    os.environ["GPU_DEVICE"], os.environ["PYTHONUNBUFFERED"] = device, "1"
    found = checks(device, options.nccl)
    if unknown := sorted(set(options.only or ()) - {check.name for check in found}):
        parser.error(f"no check is named {unknown[0]}: write {', '.join(check.name for check in found)}")
    table, deadline = Table(options.out), time.monotonic() + options.seconds * rows.patience()
    table.add(Check("versions", 0, (), 0), "versions", *versions_row(device, options.nccl))
    adopt_orphans()
    named = {check.name: check for check in found}
    wanted = [named[name] for name in options.only] if options.only else [each for each in found if not each.asked]
    for check in wanted:
        left = deadline - time.monotonic()
        if left < 10:
            table.add(check, check.name, "not made: no time was left", False, {})
            continue
        run(check, table, min(check.limit * rows.patience(), left))
    print(f"{table.failed} failed, {time.monotonic() - table.began:.0f} s")
    return int(table.failed > 0)


def versions_row(device: str, library: str | None) -> tuple[str, bool, dict[str, Any]]:
    text, figures = versions(device, library)
    return text, True, figures


if __name__ == "__main__":
    sys.exit(main())
