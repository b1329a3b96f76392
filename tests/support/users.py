"""Programs of other users, who cannot read this environment's packages: all is imported before root becomes them."""

from __future__ import annotations

import importlib
import os
import pwd
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

# What the agent and the commands import late.
LATE = (
    "encodings.idna",
    "unicron_ctl.agent.loop.agent",
    "unicron_ctl.agent.loop.plain_ranks",
    "unicron_ctl.agent.start.unprotected",
    "unicron_ctl.shared.protocol.controller_discovery",
)
AGENT = "unicron_ctl.agent.start.agent_main:main"


class User:
    """One ordinary user of this machine (root only), with a folder of its own below `folder`, which all may enter."""

    def __init__(self, name: str, folder: Path, environment: Mapping[str, str]):
        self.name, self.uid, self.gid = name, pwd.getpwnam(name).pw_uid, pwd.getpwnam(name).pw_gid
        self.folder = folder / name
        self.folder.mkdir(mode=0o700)
        os.chown(self.folder, self.uid, self.gid)
        self.log = folder / f"{name}.log"
        self.environment = dict(environment) | {"HOME": str(self.folder), "TMPDIR": str(self.folder)}
        self._started: list[subprocess.Popen[bytes]] = []

    def call(self, *command: str) -> subprocess.CompletedProcess[str]:
        """Run one of the system's programs to its end."""
        return subprocess.run(
            command,
            env=self.environment,
            cwd=self.folder,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
            user=self.uid,
            group=self.gid,
            extra_groups=[],
        )

    def start(self, target: str, *words: str, **settings: str) -> subprocess.Popen[bytes]:
        """Start MODULE:FUNCTION with `words` as the arguments of its program; what it writes is in `log`."""
        with self.log.open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", __name__, str(self.uid), str(self.gid), target, *words],
                env=self.environment | settings,
                cwd="/",
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        self._started.append(process)
        return process

    def close(self) -> None:
        """End what was started."""
        for process in self._started:
            process.terminate()
        for process in self._started:
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def main() -> None:
    uid, gid, target = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    for name in LATE:
        importlib.import_module(name)
    module, _, function = target.partition(":")
    program = getattr(importlib.import_module(module), function)
    os.setgroups([])
    os.setgid(gid)
    os.setuid(uid)
    os.chdir(os.environ["HOME"])
    sys.argv = [target, *sys.argv[4:]]
    program()


if __name__ == "__main__":
    main()
