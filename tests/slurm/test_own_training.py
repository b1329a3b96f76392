"""docs/own-training.md, followed to the letter in a shell: from a cluster's start to the user's own script."""

from __future__ import annotations

import os
import re
import subprocess
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.processes import ROOT, outside_slurm, wait_for
from unicron_ctl.shared.protocol.client import ask_controller

pytestmark = pytest.mark.slurm
PAGE = ROOT / "docs" / "own-training.md"
ACTIVATE = ". .venv/bin/activate\n"  # the one line that is not: the tests' environment is another one's
DONE = "~~~ status"
BLOCKS = 9


class Shell:
    """One bash, into which the page's blocks are typed."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.blocks = re.findall(r"^```sh\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
        environment = outside_slurm() | {"UNICRON_CLUSTER_DIR": str(folder / "cluster"), "OMP_NUM_THREADS": "1"}
        environment["PATH"] = os.pathsep.join([sysconfig.get_path("scripts"), environment["PATH"]])
        environment["PYTHONPATH"] = str(ROOT)
        self._bash = subprocess.Popen(
            ["bash"],
            cwd=folder,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def type(self, text: str) -> str:
        """What the lines print; each must succeed."""
        assert self._bash.stdin is not None and self._bash.stdout is not None
        self._bash.stdin.write(f"trap 'failed=$BASH_COMMAND' ERR; failed=\n{text}\necho \"\n{DONE} $failed\"\n")
        self._bash.stdin.flush()
        said: list[str] = []
        for line in self._bash.stdout:
            if line.startswith(DONE):
                assert line.strip() == DONE, f"{line}{''.join(said)}"
                return "".join(said)
            said.append(line)
        raise AssertionError(f"the shell has ended: {''.join(said)}")

    def next(self) -> str:
        """The page's next block."""
        return self.type(self.blocks.pop(0).replace(ACTIVATE, ""))

    def job(self, name: str) -> dict[str, Any]:
        """What `unicronctl jobs` says of it; empty before it is known. A command for each look would take a core."""
        address = self.type("echo $UNICRON_CONTROLLER").strip()
        return next((job for job in ask_controller({"kind": "jobs"}, address, timeout=30.0) if job["name"] == name), {})

    def close(self) -> None:
        try:
            self.type("unicronctl cluster down")
        finally:
            self._bash.kill()
            self._bash.communicate()

    def logs(self) -> str:
        """Of all jobs."""
        return "\n".join(f"--- {path}\n{path.read_text()[-2000:]}" for path in self.folder.rglob("*.log"))


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    opened = Shell(tmp_path)
    try:
        yield opened
    finally:
        opened.close()


@pytest.mark.long
def test_the_page_leads_from_a_cluster_to_ones_own_script(shell: Shell) -> None:
    assert len(shell.blocks) == BLOCKS and shell.blocks[0].startswith(ACTIVATE)
    assert "6 nodes are up" in shell.next()
    assert "Submitted batch job" in shell.next()
    wait_for(lambda: len(shell.job("gpt").get("members", [])) == 2, shell.logs)
    wait_for(lambda: shell.job("gpt")["iteration"] > 2, shell.logs)
    assert re.search(r"^\d+ +gpt +running +2/2 ", shell.next(), re.MULTILINE)
    assert "injected rank-kill" in shell.next()
    wait_for(lambda: shell.job("gpt")["failures"] == 1, shell.logs)
    told = shell.next()
    assert "failure_detected" in told and "killed_from_outside" in told
    wait_for(lambda: len(shell.job("gpt")["members"]) == 2, shell.logs)
    shell.next()
    wait_for(lambda: shell.job("gpt")["ended"], shell.logs)
    assert shell.job("gpt")["ended"]["code"] == 0
    assert "Submitted batch job" in shell.next()
    wait_for(lambda: shell.job("train").get("ended"), shell.logs)
    assert shell.job("train")["ended"]["code"] == 0 and shell.job("train")["mode"] == "restart"
    said = wait_for(lambda: re.findall(r"^rank \d of 2$", shell.logs(), re.MULTILINE), shell.logs)
    assert sorted(said) == ["rank 0 of 2", "rank 1 of 2"]
    assert "Submitted batch job" in shell.next()
    wait_for(lambda: shell.job("loop").get("ended"), shell.logs)
    assert shell.job("loop")["ended"]["code"] == 0 and shell.job("loop")["mode"] == "session"
    wait_for(lambda: "iteration 2000: loss " in shell.logs(), shell.logs)
    assert "the cluster is down" in shell.next()
