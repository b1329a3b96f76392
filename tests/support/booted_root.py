"""A Debian of its own with systemd as its first process, in which packages are installed as on a real machine. It needs
root and debootstrap, and shares this machine's network."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

# What a first process needs to take this for a container: its own mounts, processes, control groups and host name.
BOOT = r"""
set -e
cd "$1"
mount --make-rprivate /
mount --bind "$1" "$1"
cd "$1"
mount -t proc proc proc
mount -t tmpfs tmpfs run
mount -t tmpfs -o mode=1777 tmpfs tmp
mount -t sysfs -o ro sysfs sys
mount -t cgroup2 cgroup2 sys/fs/cgroup
mount -t tmpfs -o mode=755 tmpfs dev
for device in null zero full random urandom tty; do touch dev/$device; mount --bind /dev/$device dev/$device; done
mkdir dev/shm dev/pts
mount -t tmpfs -o mode=1777 tmpfs dev/shm
mount -t devpts -o newinstance,ptmxmode=0666 devpts dev/pts
ln -s pts/ptmx dev/ptmx; ln -s /proc/self/fd dev/fd; ln -s /proc/self/fd/1 dev/stdout; ln -s /proc/self/fd/2 dev/stderr
pivot_root . .
umount -l .
exec >/dev/null 2>&1 </dev/null
exec env -i container=unicron-test PATH=/usr/sbin:/usr/bin:/sbin:/bin /lib/systemd/systemd --log-target=null
"""
INCLUDED = "ca-certificates,dbus,iproute2,procps,python3,systemd,systemd-sysv"
RUNNING = ("running", "degraded")


class BootedRoot:
    """A Debian that runs. `run` is a shell in it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._init: subprocess.Popen[bytes] | None = None
        self._group = _unified() / f"unicron-{os.getpid()}-{folder.name}"

    def boot(self, seconds: float = 60.0) -> None:
        """Starts systemd, and returns when it has started its units. Raises TimeoutError."""
        self._group.mkdir(exist_ok=True)
        join = f"echo 0 > {self._group}/cgroup.procs; exec setsid unshare --pid --mount --cgroup --uts --ipc --fork "
        self._init = subprocess.Popen(["bash", "-c", f"{join} --kill-child bash -c '{BOOT}' boot {self.folder}"])
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            with contextlib.suppress(OSError, subprocess.SubprocessError, IndexError):
                if self.run("systemctl is-system-running", check=False).strip() in RUNNING:
                    return
            time.sleep(0.5)
        raise TimeoutError(f"{self.folder}: systemd is not up after {seconds:g} s")

    def run(self, script: str, user: str = "root", seconds: float = 300.0, check: bool = True) -> str:
        """What a shell script prints, its errors among it. Raises AssertionError with that where it fails."""
        pid = self._first_process()
        words = f"nsenter -t {pid} -m -p -C -u -i env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin LANG=C.UTF-8".split()
        words += ["TERM=dumb", "DEBIAN_FRONTEND=noninteractive", f"PIP_CERT={os.environ.get('PIP_CERT', '')}"]
        words += ["su", "-", user, "-s", "/bin/bash", "-c", f"cd ~; export DEBIAN_FRONTEND=noninteractive; {script}"]
        done = subprocess.run(words, capture_output=True, text=True, timeout=seconds, stdin=subprocess.DEVNULL)
        assert not check or done.returncode == 0, f"{script}\n{done.stdout}{done.stderr}"
        return done.stdout + done.stderr

    def _first_process(self) -> int:
        assert self._init is not None
        children = Path(f"/proc/{self._init.pid}/task/{self._init.pid}/children").read_text().split()
        return int(children[0])

    def stop(self) -> None:
        """Ends all of it."""
        if self._init is not None:
            with contextlib.suppress(OSError, IndexError):
                os.kill(self._first_process(), signal.SIGKILL)
            self._init.kill()
            self._init.wait(30)
        for _ in range(50):
            if _removed(self._group):
                return
            time.sleep(0.1)


def _removed(group: Path) -> bool:
    """Removes a control group with those below it. False while processes of it still end."""
    for folder, _, _ in os.walk(group, topdown=False):
        try:
            os.rmdir(folder)
        except OSError:
            return False
    return True


def _unified() -> Path:
    """Where the control groups of version 2 are."""
    for line in Path("/proc/mounts").read_text().splitlines():
        if line.split()[2] == "cgroup2":
            return Path(line.split()[1])
    raise RuntimeError("this machine has no control groups of version 2")


def debootstrap(suite: str, folder: Path) -> None:
    """Makes a minimal Debian with systemd, where there is none."""
    if (folder / ".complete").exists():
        return
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    command = ["debootstrap", "--variant=minbase", f"--include={INCLUDED}", suite, str(folder)]
    subprocess.run(command, check=True, capture_output=True, timeout=900)
    (folder / "etc/apt/apt.conf.d/90test").write_text('Acquire::Check-Valid-Until "false";\n')
    (folder / ".complete").touch()


def bring_names(folder: Path) -> None:
    """Names of hosts and certificates, as this machine has them."""
    for name in ("etc/resolv.conf", "etc/hosts", os.environ.get("PIP_CERT", "").lstrip("/")):
        if name and Path("/", name).exists():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).unlink(missing_ok=True)
            shutil.copyfile(Path("/", name).resolve(), folder / name)


@contextlib.contextmanager
def booted(folder: Path) -> Iterator[BootedRoot]:
    """A Debian that runs until the block ends."""
    bring_names(folder)
    root = BootedRoot(folder)
    try:
        root.boot()
        yield root
    finally:
        root.stop()
