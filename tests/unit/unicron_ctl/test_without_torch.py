"""The controller, the agent and the commands run where torch is not installed, as on a head node."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    "module", ["unicron_ctl.controller.unicrond", "unicron_ctl.agent.start.agent_main", "unicron_ctl.cli.unicronctl"]
)
def test_it_is_imported_without_torch(module: str) -> None:
    code = f"import sys; sys.modules['torch'] = None; import {module}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
