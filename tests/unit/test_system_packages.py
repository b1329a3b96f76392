"""tools/system-packages.sh needs no lock where nothing is missing."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from tests.support.processes import ROOT


def test_a_file_system_without_locks_is_no_obstacle(tmp_path: Path) -> None:
    """Defect: NFS locks no file that is open for reading only, and Lustre none without its option `flock`. In a folder
    there `make venv` ended with flock's own line, though no package was missing."""
    refuses = tmp_path / "flock"
    refuses.write_text("#!/bin/sh\necho 'flock: 9: Bad file descriptor' >&2\nexit 66\n")
    refuses.chmod(0o755)
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    script = str(ROOT / "tools" / "system-packages.sh")
    done = subprocess.run([script, "venv"], env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
