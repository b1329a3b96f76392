"""A user's own `detector/`, `transition/`, `shared/`, `planner.py` and `protocol.py` beside the script are the user's,
in both modes, also where a folder has no `__init__.py`."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests.support.controller import Controller
from tests.support.jobs import Job
from tests.support.processes import COLD_LIMIT
from unicron_ctl.shared.system.release import rank_roots

pytestmark = pytest.mark.process
SOURCE = os.pathsep.join(rank_roots())  # what an editable install has on sys.path
USERS = (
    "detector/__init__.py",
    "detector/processes.py",
    "transition/mine.py",
    "planner.py",
    "protocol.py",
    "shared/mine.py",
    "unicron_ctl.py",
)
IMPORTS = """
import detector, detector.processes, planner, protocol, shared.mine, transition.mine, unicron_ctl
modules = (detector, detector.processes, planner, protocol, shared.mine, transition.mine, unicron_ctl)
of_the_user = [each.WHOSE for each in modules]
"""
SESSION = f"""{IMPORTS}
import torch
import unicron

unicron.init_process_group("gloo")
model = torch.nn.Linear(2, 1)
session = unicron.Session(
    model=model,
    optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
    micro_batches=2,
    forward_step=lambda batch, model: model(batch).mean(),
    fetch=lambda iteration, index: torch.ones(1, 2),
    train_iterations=3,
)
print("trained", [result.iteration for result in session], of_the_user, flush=True)
"""
RESTART = f"""{IMPORTS}
import os

print("trained", os.environ["WORLD_SIZE"], of_the_user, flush=True)
"""


@pytest.fixture(scope="module")
def controller(tmp_path_factory):
    started = Controller(tmp_path_factory.mktemp("controller"))
    yield started
    started.close()


@pytest.mark.parametrize("warm", ["1", pytest.param("0", marks=pytest.mark.wide)])
@pytest.mark.parametrize(("name", "text", "trained"), [("session", SESSION, "[0, 1, 2]"), ("restart", RESTART, "1")])
def test_modules_of_the_user_with_names_of_ours_are_the_users(controller, tmp_path: Path, name, text, trained, warm):
    script = tmp_path / "train.py"
    script.write_text(text)
    for each in USERS:
        (tmp_path / each).parent.mkdir(exist_ok=True)
        (tmp_path / each).write_text("WHOSE = 'mine'\n")
    number = str(100 + 2 * (name == "session") + int(warm))
    job = Job(
        tmp_path, controller.address, number, 1, [sys.executable, str(script)], PYTHONPATH=SOURCE, UNICRON_WARM=warm
    )
    try:
        assert job.agents[0].wait(COLD_LIMIT) == 0, job.logs
    finally:
        job.close()
    log = job.agents[0].log
    assert f"{name} mode" in log and f"trained {trained} {['mine'] * len(USERS)}" in log, log
    assert controller.job(number)["state"] == "ended"
