"""An interrupt ends the sruns of `unicronctl`. srun and scancel are scripts here."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.fake_programs import program
from tests.support.processes import wait_for

LIMIT = 20.0  # seconds; the sruns here would take longer


class Sruns:
    """An srun that notes the name of its job and hangs, and a scancel that notes its words."""

    def __init__(self, folder: Path):
        self._started, self._ended = folder / "srun", folder / "scancel"
        (folder / "bin").mkdir()
        for name, line in (("srun", "exec sleep 300"), ("scancel", "exit 0")):
            program(folder / "bin" / name, f'echo "$1" | sed s/job-// >> {folder}/{name}\n{line}')
        self.environment = {"PATH": f"{folder}/bin:/usr/bin:/bin", "SLURM_JOB_ID": "7"}

    def _names(self) -> list[str]:
        return self._started.read_text().splitlines() if self._started.exists() else []

    def interrupt_if(self, first: bool) -> None:
        """What Ctrl-C does to the thread that waits for the first one, when the two others run."""
        if first:
            wait_for(lambda: len(self._names()) == 2, "both run", LIMIT)
            raise KeyboardInterrupt

    def all_end(self, run: Callable[[], object]) -> None:
        """At once, when this is interrupted."""
        began = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            run()
        assert time.monotonic() - began < LIMIT
        assert set(self._ended.read_text().splitlines()) == set(self._names()), "by the names of their jobs"
