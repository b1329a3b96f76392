"""Kernel messages about this node's hardware since the last check, for a check that root runs.

The agents read the kernel log, too, but an agent is its user's process, so its word moves its own job only. This check
may drain the node, so it believes nothing that a user can write: only the kernel's own records count (userspace writes
to /dev/kmsg under another facility), and only lines whose beginning no process name can imitate.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from unicron_detector.failures.classify import Classifier
from unicron_detector.failures.severity import Severity, Verdict
from unicron_detector.health.kernel_log import RECORD_BYTES, line_of

MOST_LINES = 5  # lines that are remembered
# Causes that are certainly the hardware's. A program may cause a driver's failure, an oops or a DMA fault.
PROVEN = frozenset({"ecc_error", "gpu_lost", "nvlink_error", "host_hardware_error", "nic_error"})
UNPROVEN = frozenset({"pcie-hotplug"})  # rules: an admin may pull a device
# Some lines of the kernel begin with the name of a process, which its user chooses. It has at most 15 characters
# (prctl(2), PR_SET_NAME), and these beginnings are longer.
_PCI = r"[0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]"
_OWN = re.compile(
    r"NVRM:? Xid \(PCI:[0-9a-f:.]{7,}\): \d+"
    r"|nvidia-nvswitch\d+: SXid \(PCI:[0-9a-f:.]{7,}\): \d+"
    r"|EDAC MC\d+: (?:\d+ )?UE (?:[a-z ]{6,}|on mc#\d)"
    r"|mce: \[Hardware Error\]: |(?:\{\d+\})?\[Hardware Error\]: "
    rf"|pcieport {_PCI}: |mlx[45]_core {_PCI}|amdgpu {_PCI}: "
    r"|Memory failure: 0x[0-9a-f]+: ",
    re.IGNORECASE,
)
_HEAD = re.compile(rb"^(\d+),(\d+),\d+,[^;]*;")
_OF_A_USER = re.compile(r",? (?:pid|name|comm)[=:].*")  # the rest of the line may hold a process's name


class KernelState(msgspec.Struct):
    """The state of earlier checks of one boot."""

    boot: str
    last: int  # number of the last record
    bad: list[str] = []  # the lines that condemn the node


def proven(line: str, classifier: Classifier) -> Verdict | None:
    """Return the verdict on a line of the kernel that proves the node's hardware broken; None for any other."""
    if not _OWN.match(line):
        return None
    verdict = classifier.match(_OF_A_USER.sub("", line), "kernel")
    if verdict is None or verdict.severity is not Severity.SEV1:
        return None
    return verdict if verdict.cause in PROVEN and verdict.rule not in UNPROVEN else None


def check_kernel_log(log: Path, boot: str, state: Path, classifier: Callable[[], Classifier]) -> list[str]:
    """Return lines since the first check of this boot that prove the hardware broken, with their meaning. The first
    check of all only notes where the log ends. Raises OSError.

    state: a file in a folder that only this user can write; delete it once the hardware is mended. classifier: called
    only if a line needs it.
    """
    before = _load(state, boot)
    last, bad = (before.last, before.bad) if before else (-1, [])
    for number, line in _records(log):
        if before is not None and number > last and len(bad) < MOST_LINES and _OWN.match(line):
            if verdict := proven(line, classifier()):
                bad.append(f"{verdict.cause}: {line[:120]}")
        last = max(last, number)
    _save(state, KernelState(boot, last, bad))
    return bad


def _records(log: Path) -> Iterator[tuple[int, str]]:
    """Yield (sequence number, text) of the kernel's own records (Documentation/ABI/testing/dev-kmsg), oldest first."""
    descriptor = os.open(log, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        device = stat.S_ISCHR(os.fstat(descriptor).st_mode)
        for record in _read(descriptor) if device else b"".join(_read(descriptor)).split(b"\n"):
            head = _HEAD.match(record)
            if head and int(head.group(1)) >> 3 == 0:  # facility 0 is the kernel's alone
                yield int(head.group(2)), line_of(record)
    finally:
        os.close(descriptor)


def _read(descriptor: int) -> Iterator[bytes]:
    while True:
        try:
            data = os.read(descriptor, RECORD_BYTES)
        except BlockingIOError:
            return
        except OSError as error:
            if error.errno != errno.EPIPE:  # overwritten before it was read: the next read goes on behind it
                raise
            continue
        if not data:
            return
        yield data


def _load(state: Path, boot: str) -> KernelState | None:
    try:
        before = msgspec.json.decode(state.read_bytes(), type=KernelState)
    except (FileNotFoundError, msgspec.MsgspecError, UnicodeDecodeError):  # a file that is cut off is as none
        return None
    return before if before.boot == boot else KernelState(boot, -1)


def _save(state: Path, now: KernelState) -> None:
    folder = state.parent
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    owner = folder.stat()
    if owner.st_uid != os.geteuid() or owner.st_mode & 0o022:
        raise PermissionError(errno.EPERM, "others can write there", str(folder))
    draft = state.with_suffix(f".{os.getpid()}")
    draft.write_bytes(msgspec.json.encode(now))
    draft.replace(state)
