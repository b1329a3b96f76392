"""A controller has no threads of numpy's, and hands its environment on as it was; an agent does without numpy."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.support.processes import LIMIT
from unicron_ctl.shared.system.one_thread import THREADS

PROGRAM = """
import json, os, sys
from unicron_ctl.shared.system.one_thread import one_thread
before = dict(os.environ)
with one_thread():
    import {module}
print(json.dumps([before == dict(os.environ), "numpy" in sys.modules, len(os.listdir("/proc/self/task"))]))
"""


@pytest.mark.parametrize(
    ("module", "told"),
    [("unicron_ctl.controller.server.server", {}), ("unicron_ctl.controller.server.server", {THREADS: "2"})],
)
def test_what_is_imported_has_no_threads_unless_the_user_wants_them(module, told):
    environment = {name: value for name, value in os.environ.items() if name not in (THREADS, "OMP_NUM_THREADS")}
    program = PROGRAM.format(module=module)
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=environment | told,
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=True,
    )
    unchanged, loaded, threads = json.loads(done.stdout)
    assert unchanged and loaded, "else this says nothing"
    assert threads == (min(2, len(os.sched_getaffinity(0))) if told else 1)


def test_an_agent_does_not_import_numpy():
    program = "import sys, unicron_ctl.agent.loop.plain_ranks; sys.exit('numpy' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], timeout=LIMIT, check=True)
