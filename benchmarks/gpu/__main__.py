"""Unicron on one card: a table of checks, made in under nine minutes (docs/gpu.md).

    python -m benchmarks.gpu [--device cuda|cpu] [--nccl LIBRARY] [--only NAME]... [--out FOLDER]

Without a card it is a dry run: the same programs with small models and gloo on the CPU. --nccl: a libnccl.so.2 of 2.30
or later, which allows several ranks on one card. Each check is a process of its own with a time limit; a check that
fails or hangs does not stop the others. FOLDER gets rows.jsonl, a JSON line for each row, and log.txt. Some checks run
only with --only: silent faults, a busy neighbour, the cost of a step and of audits in it, the templates and, with
--nccl, the other way of NCCL.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

import psutil

from benchmarks.gpu.rows import patience, say
from unicron_detector.processes.supervise import adopt_orphans

SECONDS = 520.0  # for all checks; a dry run may take six times that
# By NCCL's sources these allow several ranks on one card.
ONE_CARD = {
    "NCCL_MULTI_RANK_GPU_ENABLE": "1",
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_MAX_CTAS": "2",
    "NCCL_ALGO": "RING",
    "NCCL_DEBUG": "WARN",
}
# Ranks that take each other for other hosts' use sockets.
APART = {
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_IB_DISABLE": "1",
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_MAX_CTAS": "2",
    "NCCL_DEBUG": "WARN",
}
# Seconds to make a communicator: torch's own limit is 30 minutes, and nothing else ends it.
QUICK = {"TORCH_NCCL_NONBLOCKING_TIMEOUT": "6"}
# The loaded NCCL; torch.cuda.nccl.version() is the one that torch was built with.
LOADED = """
import ctypes, torch
number = ctypes.c_int()
ctypes.CDLL("libnccl.so.2").ncclGetVersion(ctypes.byref(number))
print(torch.version.cuda, number.value)
"""


@dataclass(frozen=True)
class Check:
    """A program of this package, which makes one row of the table or several."""

    name: str
    number: int
    """Its number in docs/gpu.md."""
    words: tuple[str, ...]
    limit: float
    """Seconds."""
    environment: dict[str, str] = field(default_factory=dict)
    named_only: bool = False
    """It runs only with --only."""


def checks_of(backend: str, suffix: str, environment: dict[str, str], named_only: bool = False) -> list[Check]:
    """Return the checks of several ranks."""
    number = 2 if backend == "gloo" else 3
    return [
        Check(f"aborted{suffix}", number, ("aborted", backend), 100, environment | QUICK, named_only),
        Check(f"heal{suffix}", number, ("heal", backend, "faults"), 200, environment, named_only),
        Check(f"layouts{suffix}", number, ("heal", backend, "layouts"), 150, environment, named_only),
        Check(f"sharded{suffix}", number, ("heal", backend, "sharded"), 120, environment, named_only),
        Check(f"agents{suffix}", number, ("agents", backend), 90, environment, named_only),
        Check(f"flips{suffix}", number, ("flips", backend), 200, environment, True),
        Check(f"neighbour{suffix}", number, ("neighbour", backend), 90, environment, True),
        Check(f"audits{suffix}", number, ("audits", backend), 120, environment, True),
        Check(f"templates{suffix}", number, ("templates", backend), 170, environment, True),
    ]


def checks(device: str, library: str | None) -> list[Check]:
    """Return the checks in their order. Nine minutes are enough for one way of NCCL."""
    found = [Check("alone", 1, ("alone",), 70)]
    if device == "cpu":
        found += checks_of("gloo", "-gloo", {})
    else:
        if library:
            found += checks_of("nccl", "", ONE_CARD | {"LD_PRELOAD": library})
        found += checks_of("apart", "-apart", APART, named_only=bool(library))
        found.append(Check("heal-gloo", 2, ("heal", "gloo", "faults"), 150))
    return [
        *found,
        Check("errors", 5, ("errors",), 90),
        Check("health", 6, ("health",), 40),
        Check("snapshots", 4, ("snapshots",), 150),
        Check("cost", 6, ("cost",), 120, named_only=True),
    ]


def run(check: Check, folder: Path, limit: float) -> None:
    """Run a check to its end, or to its limit."""
    os.environ["GPU_CHECK"] = f"{check.number} {check.name}"
    words = [sys.executable, "-m", f"benchmarks.gpu.{check.words[0]}", *check.words[1:]]
    environment = os.environ | check.environment
    with (folder / "log.txt").open("ab") as log:
        log.write(f"======== {check.name}\n".encode())
        log.flush()
        process = subprocess.Popen(words, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    try:
        if code := process.wait(limit):
            say(check.name, f"ended with {code}", ok=False)
    except subprocess.TimeoutExpired:
        say(check.name, f"not over after {limit:.0f} s, ended", ok=False)
    end_all()


def end_all() -> None:
    """End all processes of a check. They are this one's children, which adopts orphans."""
    deadline = time.monotonic() + 10
    while (left := psutil.Process().children(recursive=True)) and time.monotonic() < deadline:
        for process in left:
            try:
                process.send_signal(signal.SIGKILL)
            except psutil.NoSuchProcess:
                continue
        psutil.wait_procs(left, 1)


def nccl_version(library: str | None) -> str:
    """Return the versions of CUDA and of the NCCL that is loaded."""
    environment = os.environ | ({"LD_PRELOAD": library} if library else {})
    command = [sys.executable, "-c", LOADED]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    return done.stdout.strip() or done.stderr[-200:]


def versions(device: str, library: str | None) -> dict[str, str]:
    """Return the versions of this machine."""
    found = {"python": platform.python_version(), "kernel": platform.release(), "cores": str(os.cpu_count())}
    for name in ("torch", "megatron-core", "numpy", "pyzmq", "msgspec"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "none"
    found["shared memory"] = f"{psutil.disk_usage('/dev/shm').free / 1e9:.0f} GB"
    if device == "cuda":
        query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
        found["card"] = subprocess.run(query, capture_output=True, text=True, timeout=30, check=False).stdout.strip()
        found["CUDA, NCCL"] = nccl_version(None)
        if library:
            found["NCCL of several ranks on a card"] = nccl_version(library).split()[-1]
    return found


def rows_of(path: Path, began: float) -> Iterator[bool]:
    """Print the new rows of a file at each call of next(). Yield whether a row has failed so far."""
    failed = False
    with path.open() as file:
        while True:
            for line in file:
                row = json.loads(line)
                failed = failed or not row["ok"]
                text = f"{row['at'] - began:5.0f} s  {row['check']}  {'ok    ' if row['ok'] else 'FAILED'}  "
                print(f"{text}{row['what']}: {row['saw']}"[:1800], flush=True)
            yield failed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), help="by default what there is")
    parser.add_argument("--nccl", metavar="LIBRARY", help="libnccl.so.2 of 2.30 or later")
    parser.add_argument("--only", action="append", metavar="NAME", help="this check; may be given again; in this order")
    parser.add_argument("--out", type=Path, metavar="FOLDER", default=Path(tempfile.gettempdir(), "unicron-gpu"))
    options = parser.parse_args()
    device = options.device or ("cuda" if Path("/dev/nvidiactl").exists() else "cpu")
    found = {check.name: check for check in checks(device, options.nccl)}
    if unknown := sorted(set(options.only or ()) - set(found)):
        parser.error(f"no check is named {unknown[0]}: write {', '.join(found)}")
    options.out.mkdir(parents=True, exist_ok=True)
    path, began = options.out.resolve() / "rows.jsonl", time.time()
    for file in (path, options.out / "log.txt"):
        file.write_text("")
    os.environ |= {"GPU_DEVICE": device, "PYTHONUNBUFFERED": "1", "GPU_ROWS": str(path), "GPU_CHECK": "0 versions"}
    adopt_orphans()
    about = versions(device, options.nccl)
    say("versions", ", ".join(f"{name} {value}" for name, value in about.items()), **about)
    failed = rows_of(path, began)
    for name in options.only or [check.name for check in found.values() if not check.named_only]:
        next(failed)
        left = began + SECONDS * patience() - time.time()
        if left < 10:
            say(name, "not made: no time was left", ok=False)
        else:
            run(found[name], options.out, min(found[name].limit * patience(), left))
    wrong = next(failed)
    print(f"{'failed' if wrong else 'passed'}, {time.time() - began:.0f} s; rows and log are in {options.out}")
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main())
