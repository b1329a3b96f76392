"""Unmodified scripts under real agents and a real unicrond: one world, and a new one whenever something fails."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.support.controller import Controller
from tests.support.jobs import AGENT, PLAIN, Job, json_lines
from tests.support.processes import LIMIT, ROOT, is_alive, outside_slurm, wait_for

pytestmark = pytest.mark.process
COMMAND = [sys.executable, str(PLAIN)]
SETTINGS = """
lease_periods = 4
forming_settle_seconds = 4
join_after_seconds = 1
restart_grace = 20
"""


@pytest.fixture(scope="module")
def controller(tmp_path_factory):
    started = Controller(tmp_path_factory.mktemp("controller"), SETTINGS)
    yield started
    started.close()


class Plain:
    """A job of the script with what its ranks have written."""

    def __init__(self, folder: Path, address: str, name: str, count: int, **settings: str):
        self.out = folder / f"out{name}"
        self.out.mkdir()
        self.job = Job(folder, address, name, count, COMMAND, PLAIN_OUT=str(self.out), **settings)

    def steps(self, element: int) -> list[dict]:
        return json_lines(self.out / f"steps.{element}")

    def world(self, size: int, after: int = 0) -> dict:
        """Wait until a world of this size, younger than generation `after`, has made three steps; the last of them."""

        def found() -> list[dict]:
            return [s for s in self.steps(0) if s["size"] == size and s["generation"] > after]

        return wait_for(lambda: len(found()) > 2 and found()[-1], lambda: f"a world of {size}\n{self.job.logs}")

    def stop(self) -> list[int]:
        (self.out / "stop").touch()
        return self.job.wait()


def test_a_torch_script_goes_on_from_its_checkpoint_after_a_kill(controller, tmp_path):
    plain = Plain(tmp_path, controller.address, "60", 2, PLAIN_BACKEND="gloo", UNICRON_MIN_NODES="2")
    try:
        before = plain.world(2)
        assert "job=60_0 node=n0: restart mode: plain_train.py does not import unicron" in plain.job.agents[0].log
        pids = [plain.steps(element)[-1]["pid"] for element in range(2)]
        os.kill(pids[1], signal.SIGKILL)
        after = plain.world(2, before["generation"])
        assert after["begun"] >= before["step"] and after["port"] != before["port"]
        assert not any(is_alive(pid) for pid in pids), "all processes are new"
        assert plain.stop() == [0, 0], plain.job.logs
    finally:
        plain.job.close()
    last = [plain.steps(element)[-1] for element in range(2)]
    assert [each["rank"] for each in last] == [0, 1] and len({each["step"] for each in last}) == 1
    job = controller.job("60")
    assert (job["mode"], job["state"], job["iteration"], job["ended"]["code"]) == ("restart", "ended", -1, 0)
    blamed = [f for f in controller.events("failure_detected", job="60") if f["severity"] == 2]
    assert [f["kind_of_failure"] for f in blamed] == ["rank"], f"whoever died of it is not blamed: {blamed}"


FROM_INPUT = """import os, pathlib
rank, size, out = os.environ["RANK"], os.environ["WORLD_SIZE"], pathlib.Path(os.environ["PLAIN_OUT"])
with open(out / "began", "a") as file:
    file.write(f"{rank} of {size}\\n")
if rank == "1" and not (out / "failed").exists():
    (out / "failed").touch()
    os._exit(3)
"""


def test_each_rank_reads_its_program_from_standard_input_and_again_after_a_failure(controller, tmp_path):
    """Defect: rank 0 had it all, the next world had nothing, and the job was said to be complete."""
    settings = {"PLAIN_OUT": str(tmp_path), "SLURM_JOB_ID": "69", "UNICRON_CONTROLLER": controller.address}
    settings |= {"UNICRON_RANKS_PER_NODE": "2", "SLURMD_NODENAME": "n0", "UNICRON_NODE_ADDRESS": "127.0.0.1"}
    done = subprocess.run(
        [*AGENT, "run", "--", sys.executable, "-"],
        input=FROM_INPUT.encode(),
        env=outside_slurm() | settings,
        cwd=ROOT,
        stderr=subprocess.PIPE,
        timeout=LIMIT,
    )
    assert done.returncode == 0, done.stderr
    began = (tmp_path / "began").read_text().splitlines()
    assert began.count("1 of 2") == 2 and began[-2:] in (["0 of 2", "1 of 2"], ["1 of 2", "0 of 2"]), began


@pytest.fixture(scope="module")
def story(controller, tmp_path_factory):
    """Three nodes; the agent of one dies, and its element is started again."""
    folder = tmp_path_factory.mktemp("story")
    plain = Plain(folder, controller.address, "61", 3, UNICRON_MIN_NODES="2")
    told = SimpleNamespace(plain=plain, controller=controller)
    try:
        told.first = plain.world(3)
        told.lost_pid = plain.steps(2)[-1]["pid"]
        plain.job.agents[2].kill()
        told.smaller = plain.world(2, told.first["generation"])
        plain.job.start(2)
        told.whole = plain.world(3, told.smaller["generation"])
        told.codes = plain.stop()
        yield told
    finally:
        plain.job.close()


def test_a_lost_agent_leaves_a_smaller_world_which_goes_on(story):
    assert not is_alive(story.lost_pid)
    assert story.smaller["begun"] >= story.first["step"] and story.smaller["size"] == 2
    failures = story.controller.events("failure_detected", job="61")
    assert [f["node"] for f in failures if f["kind_of_failure"] == "agent"] == ["n2"]


def test_a_node_that_comes_back_is_taken_in_by_a_restart_with_its_reason(story):
    assert story.whole["begun"] >= story.smaller["step"]
    breaks = [event["reason"] for event in story.controller.events("break", job="61")]
    assert "1 rank joins" in breaks[-1] and "start again in a larger world" in breaks[-1]


def test_all_end_together(story):
    assert story.codes == [0, 0, 0], story.plain.job.logs
    assert story.controller.job("61")["ended"]["code"] == 0
    assert not list(story.plain.job.agents[0].folder.glob("unicron-*"))


def test_several_ranks_per_node_and_a_failure_after_others_have_ended(controller, tmp_path):
    """Rank 3 fails at its end the first time, when the others are through: all run once more."""
    script = tmp_path / "late.py"
    script.write_text(
        "import os, pathlib, sys, time\n"
        "env, out = os.environ, pathlib.Path(os.environ['PLAIN_OUT'])\n"
        "names = ('RANK', 'WORLD_SIZE', 'LOCAL_RANK', 'LOCAL_WORLD_SIZE')\n"
        "with (out / 'runs').open('a') as file: file.write(' '.join(env[name] for name in names) + '\\n')\n"
        "if env['RANK'] == '3':\n"
        "    time.sleep(2)\n"
        "    if not (out / 'failed').exists():\n"
        "        (out / 'failed').touch()\n"
        "        sys.exit('no space left')\n"
    )
    (tmp_path / "out").mkdir()
    settings = {"PLAIN_OUT": str(tmp_path / "out"), "UNICRON_RANKS_PER_NODE": "2"}
    job = Job(tmp_path, controller.address, "62", 2, [sys.executable, str(script)], **settings)
    try:
        assert job.wait() == [0, 0], job.logs
    finally:
        job.close()
    runs = sorted((tmp_path / "out" / "runs").read_text().splitlines())
    assert runs == sorted(["0 4 0 2", "1 4 1 2", "2 4 0 2", "3 4 1 2"] * 2), job.logs


def test_a_script_that_fails_at_once_ends_the_job_with_its_traceback(controller, tmp_path):
    bad = tmp_path / "bad.py"
    bad.write_text("import no_such_library\n")
    job = Job(tmp_path, controller.address, "63", 2, [sys.executable, str(bad)])
    try:
        assert job.wait() == [1, 1], job.logs
    finally:
        job.close()
    log = job.agents[0].log
    assert log.count("ModuleNotFoundError: No module named 'no_such_library'") >= 3 and "Traceback" in log
    assert "the job's own error" in log, log  # not the last line: processes may still write while they are ended


def test_a_step_that_the_others_have_behind_them_runs_alone(controller, tmp_path):
    """An element that was requeued runs its batch script from the start."""
    # Its imports make it a training, though the framework need not be there.
    show = (
        "import os\ntry:\n    import some_framework\nexcept ImportError:\n"
        "    print('world', os.environ['WORLD_SIZE'], flush=True)"
    )
    job = Job(tmp_path, controller.address, "65", 2, ["sleep", "600"], SLURM_STEP_ID="1")
    try:
        wait_for(lambda: controller.job("65").get("state") == "running", lambda: job.logs)
        job.agents[1].kill()
        again = job.start(1, [sys.executable, "-c", show], SLURM_STEP_ID="0")
        assert again.wait() == 0 and "\nworld 1\n" in again.log
        assert (
            "step 0 of job 65 is over for the other elements, which are at step 1; the job runs unprotected"
            in again.log
        )
    finally:
        job.close()


def test_an_agent_of_another_mode_is_refused_with_one_line_and_runs_unprotected(controller, tmp_path):
    job = Job(tmp_path, controller.address, "64", 1, ["sleep", "600"])
    try:
        wait_for(lambda: controller.job("64").get("state") == "running", lambda: job.logs)
        job.agents[0].kill()
        again = job.start(0, [sys.executable, "-c", "raise SystemExit(5)"], UNICRON_MODE="session")
        assert again.wait() == 5
        said = "job 64 is healed in restart mode, this agent would be in session mode (UNICRON_MODE=session)"
        assert said in again.log and "the job runs unprotected" in again.log
    finally:
        job.close()
