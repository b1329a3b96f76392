"""Real agents: with a real unicrond and a Megatron training, with a controller in the test's hands, with none."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.support.controller import Controller
from tests.support.jobs import AGENT, FOREVER, Job, scripted
from tests.support.processes import ROOT, call, is_alive, outside_slurm, undated, wait_for
from tests.support.scripted import FakeController
from unicron_ctl.shared.protocol import wire
from unicron_detector.formats import PROTOCOL

pytestmark = pytest.mark.process
TEMPLATE = ROOT / "sbatch_templates" / "train_gpt.py"


@pytest.fixture(scope="module")
def controller(tmp_path_factory):
    started = Controller(tmp_path_factory.mktemp("controller"))
    yield started
    started.close()


@pytest.fixture
def fake():
    made = FakeController()
    yield made
    made.close()


# ---------------------------------------------------------------- a real unicrond and a real training
@pytest.fixture(scope="module")
def story(tmp_path_factory):
    """Three nodes lose a rank, their controller in the midst of that recovery, the controller again, then an agent; at
    the end a signal stops the training. Every step of it needs the one before, and each rank's start costs seconds.
    """
    folder = tmp_path_factory.mktemp("story")
    controller = Controller(folder)
    job = Job(folder, controller.address, "7", 3, TINY_ITERATIONS=FOREVER, TINY_SLOW="0.05")
    told = SimpleNamespace(job=job, controller=controller)
    try:
        _play(told, job, controller)
        yield told
    finally:
        job.close()
        controller.close()


def _play(told: SimpleNamespace, job: Job, controller: Controller) -> None:
    job.reached(2)
    paused, victim = controller.rank(0, "7")["pid"], controller.rank(1, "7")["pid"]

    # A survivor cannot report, so the recovery stands still between its Break and its Plan.
    os.kill(paused, signal.SIGSTOP)
    os.kill(victim, signal.SIGKILL)
    wait_for(lambda: controller.job("7")["state"] == "breaking", "the Break")
    told.plans_before = len(controller.events("plan", job="7"))
    controller.kill()
    controller.start()
    # The agents may have begun to agree on it meanwhile; any word of the controller ends that.
    wait_for(lambda: controller.rank(0, "7") and controller.rank(2, "7"), "the controller hears them again")
    told.state_after_restart = controller.job("7")["state"]
    os.kill(paused, signal.SIGCONT)
    wait_for(lambda: controller.job("7")["members"] == [0, 2], lambda: f"the survivors' plan\n{job.logs}")
    told.without_victim = job.reached(0)
    wait_for(lambda: controller.rank(1, "7").get("incarnation") == 1, "the rank's new process")
    wait_for(lambda: controller.job("7")["members"] == [0, 1, 2], lambda: f"the rank is back\n{job.logs}")
    wait_for(lambda: controller.job("7")["state"] == "running", lambda: f"it runs\n{job.logs}")
    told.with_it_again = job.reached(1)

    controller.kill()
    told.without_controller = (job.reached(0, 5), job.reached(2, 5))
    controller.start()
    wait_for(lambda: controller.job("7")["state"] == "running", "the controller finds its job again")

    told.lost_pid = wait_for(lambda: controller.rank(2, "7").get("pid"), "its ranks again")
    told.was_alive = is_alive(told.lost_pid)
    job.agents[2].kill()
    wait_for(lambda: not is_alive(told.lost_pid), "the ranks of a killed agent end with it")
    wait_for(lambda: controller.job("7")["members"] == [0, 1], lambda: f"the others go on\n{job.logs}")
    told.without_node = job.reached(0, 3)

    job.agents[0].process.send_signal(signal.SIGUSR1)  # to one agent only
    told.codes = [job.agents[0].wait(), job.agents[1].wait()]
    wait_for(lambda: controller.job("7")["state"] == "ended", "the job's end")


def test_a_killed_rank_starts_again_in_place_and_rejoins(story):
    assert story.with_it_again > story.without_victim
    failures = story.controller.events("failure_detected", job="7")
    assert [each["kind_of_failure"] for each in failures] == ["rank", "agent"] and failures[0]["slots"] == [1]
    starts = [(each["slot"], each["incarnation"]) for each in story.controller.events("rank_start", job="7")]
    assert starts == [(1, 1)]
    generations = [each["generation"] for each in story.job.losses(0)]
    assert generations == sorted(generations) and len(set(generations)) >= 4, "without it, with it, without the node"


def test_the_log_tells_how_long_each_part_of_a_recovery_took(story):
    timings = {
        (each["generation"], each["slot"]): each["seconds"] for each in story.controller.events("timing", job="7")
    }
    survivor = next(parts for (_, slot), parts in sorted(timings.items()) if slot == 0 and "broken" in parts)
    order = [survivor[part] for part in ("broken", "planned", "grouped", "entered", "stepped")]
    assert order == sorted(order) and 0.0 <= order[0] < order[-1] < 60.0
    assert "dropped a bad message" not in story.job.logs


def test_a_recovery_that_a_controller_began_the_next_one_finishes(story):
    assert story.state_after_restart == "breaking"
    assert len(story.controller.events("plan", job="7")) > story.plans_before


def test_training_goes_on_without_a_controller(story):
    assert min(story.without_controller) >= story.with_it_again + 5


def test_the_ranks_of_a_killed_agent_end_with_it_and_the_others_go_on(story):
    assert story.was_alive and not is_alive(story.lost_pid)
    assert story.without_node > max(story.without_controller)
    (death,) = [
        event for event in story.controller.events("failure_detected", job="7") if event["kind_of_failure"] == "agent"
    ]
    assert (death["element"], death["node"], death["action"]) == (2, "n2", "restart"), "its closed door told of it"
    assert not story.controller.events("node_lost"), "the node is not blamed"


def test_a_signal_to_one_agent_ends_the_training_after_the_same_iteration_everywhere(story):
    assert story.codes == [0, 0], story.job.logs
    last = [story.job.losses(slot)[-1] for slot in (0, 1)]
    assert last[0]["iteration"] == last[1]["iteration"] >= story.without_node


def test_every_iteration_was_stepped_once_with_the_same_loss_on_every_rank(story):
    by_rank = [{each["iteration"]: each["loss"] for each in story.job.losses(slot)} for slot in range(3)]
    last = max(by_rank[0])
    assert [each["iteration"] for each in story.job.losses(0)] == list(range(last + 1))
    for other in by_rank[1:]:
        assert all(by_rank[0][iteration] == loss for iteration, loss in other.items())
    steps = [event["iteration"] for event in story.controller.events("step", job="7")]
    assert len(steps) == len(set(steps))
    assert not story.controller.events("ledger_violation", job="7")
    assert story.controller.job("7")["ledger_violations"] == 0


def test_nothing_is_left_behind_in_the_folder_of_sockets(story):
    assert not list(story.job.agents[0].folder.glob("unicron-*"))
    assert not list(story.job.agents[1].folder.glob("unicron-*"))


def test_several_ranks_per_node(controller, tmp_path):
    job = Job(tmp_path, controller.address, "8", 1, UNICRON_RANKS_PER_NODE="2", TINY_ITERATIONS="4")
    try:
        assert job.agents[0].wait() == 0, job.logs
    finally:
        job.close()
    losses = [[each["loss"] for each in job.losses(slot)] for slot in (0, 1)]
    assert len(losses[0]) == 4 and losses[0] == losses[1]
    assert sorted(controller.job("8")["elements"][0]["ranks"], key=lambda rank: rank["slot"])[1]["slot"] == 1
    computed = [
        line.split()[1:] for slot in (0, 1) for line in (job.folder / f"fetched.{slot}").read_text().splitlines()
    ]
    assert sorted(computed) == sorted([str(i), str(m)] for i in range(4) for m in range(8)), "each micro-batch once"


def test_a_script_that_fails_at_its_start_ends_the_job(controller, tmp_path):
    bad = tmp_path / "bad.py"
    bad.write_text("import sys\nraise RuntimeError('no such tokenizer')\n")
    crashes = Job(tmp_path, controller.address, "9", 1, [sys.executable, str(bad)], UNICRON_MODE="session")
    dataset = Job(
        tmp_path, controller.address, "10", 1, [sys.executable, str(TEMPLATE), "--data-path", "/nowhere/data"]
    )
    try:
        assert crashes.agents[0].wait() == 1, crashes.logs
        assert dataset.agents[0].wait() == 2, dataset.logs
    finally:
        crashes.close()
        dataset.close()
    log = crashes.agents[0].log
    assert log.count("Traceback") == log.count("\nRuntimeError: no such tokenizer") == 3, log
    reasons = [line for line in log.splitlines() if " unicron job=9_" in line and "mode:" not in line]
    assert len(reasons) == 1, log
    assert "never finished an iteration" in reasons[0] and "RuntimeError: no such tokenizer" in reasons[0]
    assert "no dataset at /nowhere/data.idx" in dataset.agents[0].log and "Traceback" not in dataset.agents[0].log
    assert controller.job("9")["state"] == controller.job("10")["state"] == "ended"


# ---------------------------------------------------------------- a controller in the test's hands
RANK = """
import os, signal, sys, time
from unicron_detector.processes.rank_channel import RankChannel
from unicron_detector.processes.rank_messages import Status
heard = []
channel = RankChannel.from_environment(heard.append)
channel.send(Status(os.environ.get("SAYS", "running"), iteration=3))
channel.flush(5)
"""
SLEEPS = RANK + "time.sleep(600)\n"


@pytest.fixture
def sleeper(fake, tmp_path):
    """An agent whose rank says that it runs."""
    job = Job(tmp_path, fake.address, "20", 1, scripted(tmp_path, SLEEPS), UNICRON_MODE="session")
    fake.welcome()
    fake.rank(lambda rank: rank.state == "running", "its rank runs")
    yield job.agents[0]
    job.close()


def test_a_stopped_agent_ends_its_ranks_and_cleans_up(fake, sleeper):
    pid = fake.rank(lambda rank: True, "a status").pid
    folder = sleeper.socket.parent
    assert is_alive(pid) and folder.stat().st_mode & 0o777 == 0o700
    sleeper.process.send_signal(signal.SIGTERM)
    assert fake.status(lambda status: bool(status.leaving)).leaving == "stopped by SIGTERM"
    assert sleeper.wait() == 128 + signal.SIGTERM
    assert not is_alive(pid) and not folder.exists()


def test_an_agent_that_is_refused_for_good_runs_its_command_unprotected(fake, tmp_path):
    job = Job(tmp_path, fake.address, "20", 1, [sys.executable, "-c", "raise SystemExit(5)"])
    fake.registration()
    fake.send(wire.Refusal(reason="job 20 has 2 ranks per node", final=True))
    assert job.agents[0].wait() == 5
    assert (
        undated(job.agents[0].log)
        == "WARNING unicron job=20_0 node=n0: job 20 has 2 ranks per node; the job runs unprotected\n"
    )


@pytest.mark.parametrize(("number", "side"), [(PROTOCOL.number + 1, "this"), (PROTOCOL.oldest - 1, "the other")])
def test_an_agent_whose_controller_is_of_another_release_runs_unprotected_and_says_why(fake, tmp_path, number, side):
    command = [sys.executable, "-c", "raise SystemExit(5)"]
    agent = Job(tmp_path, fake.address, "21", 1, command, UNICRON_REGISTER_TIMEOUT="2").agents[0]
    fake.registration()
    fake.send(wire.Refusal(reason="?", v=number))
    assert agent.wait() == 5
    *dropped, last = undated(agent.log).splitlines()
    assert f"upgrade {side} side" in last and last.endswith("; the job runs unprotected")
    assert dropped and all("dropped a bad message of the controller" in line for line in dropped)


def test_an_agent_that_is_refused_for_good_before_it_has_a_world_starts_again_without_one(fake, tmp_path):
    """It was taken in; then the controller gave the whole job up. Its rank waits for a plan that will not come."""
    program = f"import os, sys\nif 'UNICRON_INCARNATION' not in os.environ:\n    sys.exit(5)\n{SLEEPS}"
    command = scripted(tmp_path, program)
    job = Job(tmp_path, fake.address, "24", 1, command, UNICRON_MODE="session", SAYS="waiting")
    fake.welcome()
    pid = fake.rank(lambda rank: rank.state == "waiting", "its rank waits").pid
    fake.send(wire.Refusal(reason="element 2 is different", final=True))
    assert job.agents[0].wait() == 5 and not is_alive(pid)
    assert undated(job.agents[0].log).endswith(
        "WARNING unicron job=24_0 node=n0: element 2 is different; the job runs unprotected\n"
    )


@pytest.mark.parametrize(
    "refused",
    [
        wire.Refusal(reason="job 25 is healed in restart mode", final=True, apart=True),  # and its others train
        wire.Refusal(reason="another agent has taken element 0", final=True, replaced=True),
    ],
)
def test_an_agent_whose_element_is_not_its_to_train_ends(fake, tmp_path, refused):
    job = Job(tmp_path, fake.address, "25", 1, [sys.executable, "-c", "raise SystemExit('must not start')"])
    fake.registration()
    fake.send(refused)
    assert job.agents[0].wait() == 1
    assert undated(job.agents[0].log) == f"WARNING unicron job=25_0 node=n0: {refused.reason}\n"


def test_an_agent_whose_job_failed_ends(fake, tmp_path):
    job = Job(tmp_path, fake.address, "22", 1, [sys.executable, "-c", "raise SystemExit('must not start')"])
    fake.registration()
    fake.send(wire.End(code=3, reason="the script itself fails"))
    assert job.agents[0].wait() == 3
    assert undated(job.agents[0].log) == "WARNING unicron job=22_0 node=n0: the script itself fails\n"


@pytest.mark.parametrize("code", [0, 7])
def test_a_script_that_trained_to_the_end_may_finish_its_work(fake, tmp_path, code):
    """The controller ends the job when all say that they are through; the script still saves its checkpoint."""
    saved, go = tmp_path / "saved", tmp_path / "go"
    work = f"import pathlib\nwhile not pathlib.Path({str(go)!r}).exists(): time.sleep(0.05)\n"
    script = f"{RANK}{work}pathlib.Path({str(saved)!r}).write_text('all')\nsys.exit({code})\n"
    job = Job(tmp_path, fake.address, "23", 1, scripted(tmp_path, script), SAYS="finished", UNICRON_MODE="session")
    try:
        fake.welcome()
        fake.rank(lambda rank: rank.state == "finished", "its rank is through")
        fake.send(wire.End(code=0, reason="all members trained to the end"))
        fake.send(wire.Ping())
        for _ in range(3):
            fake.status()
        assert job.agents[0].process.poll() is None and not saved.exists()
        go.touch()
        assert job.agents[0].wait() == code, job.logs
    finally:
        job.close()
    assert saved.read_text() == "all"


def test_a_program_that_vanishes_counts_as_a_death(fake, tmp_path):
    program = tmp_path / "train"
    program.write_text("#!/bin/sh\nexec sleep 600\n")
    program.chmod(0o755)
    job = Job(tmp_path, fake.address, "24", 1, [str(program)], UNICRON_MODE="session")
    try:
        fake.welcome()
        pid = fake.rank(lambda rank: rank.pid > 0, "its process").pid
        program.unlink()
        fake.send(wire.StopRank(slot=0, incarnation=0, reason="test"))
        assert fake.rank(lambda rank: rank.state == "exited", "its end").exit.code == -signal.SIGKILL
        assert not is_alive(pid)
        fake.send(wire.StartRank(slot=0, incarnation=1, reason="test"))
        again = fake.rank(lambda rank: rank.incarnation == 1, "the second try")
        assert again.state == "exited" and again.exit.code == 127 and "No such file" in again.exit.last_line
    finally:
        job.close()


def test_what_a_rank_started_ends_with_it(fake, tmp_path):
    note = tmp_path / "worker"
    script = f"""
import os, subprocess
worker = subprocess.Popen(["sleep", "600"])
open({str(note)!r}, "w").write(str(worker.pid))
os._exit(3)
"""
    job = Job(tmp_path, fake.address, "25", 1, scripted(tmp_path, script), UNICRON_MODE="session")
    try:
        fake.welcome()
        assert fake.rank(lambda rank: rank.state == "exited", "its end").exit.code == 3
        worker = int(note.read_text())
        wait_for(lambda: not is_alive(worker), "the worker's end")
    finally:
        job.close()


STORE = """#!/bin/sh
case "$*" in
    "-m unicron_transition.generations.store_host")
        echo x >> {0}/tries
        [ -e {0}/no_torch ] && {{ echo no torch >&2; exit 1; }}
        echo $$ > {0}/pid
        echo "port 4000$PYTHONSAFEPATH"
        exec cat ;;
    *) exec sleep 600 ;;
esac
"""


def test_a_dead_store_is_started_again_but_not_for_ever(fake, tmp_path):
    python = tmp_path / "python-of-the-user"
    python.write_text(STORE.format(tmp_path))
    python.chmod(0o755)
    job = Job(tmp_path, fake.address, "26", 1, [str(python), "train.py"], UNICRON_MODE="session")
    agent = job.agents[0]
    try:
        fake.welcome()
        served = fake.status(lambda status: bool(status.store), "the store's address").store
        assert served.endswith(":40001"), "the working folder is kept out of its imports"
        os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)
        fake.status(lambda status: not status.store, "it is gone")
        fake.status(lambda status: bool(status.store), "the second store")
        (tmp_path / "no_torch").touch()
        os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)
        wait_for(lambda: "is torch installed there?" in agent.log, lambda: agent.log)
        assert fake.status(lambda status: not status.store, "no address")
        assert (tmp_path / "tries").read_text().count("x") == 3 and agent.process.poll() is None
    finally:
        job.close()


# ---------------------------------------------------------------- no controller, and wrong use
SHOW = "import os; print(os.environ['RANK'], os.environ['WORLD_SIZE'], flush=True); raise SystemExit(7)"


def test_without_a_controller_the_command_runs_unprotected(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as silent:  # takes connections and says nothing
        port = silent.getsockname()[1]
        address = f"tcp://127.0.0.1:{port}"
        why = {
            address: f"no controller answers at {address} (no answer from UDP port {port} of 127.0.0.1)",
            "": "no controller is configured (UNICRON_CONTROLLER)",
            "head node": "head node is not the address of a controller: write tcp://HOST:PORT",
        }
        jobs = [
            Job(tmp_path, where, str(30 + i), 1, [sys.executable, "-c", SHOW], UNICRON_REGISTER_TIMEOUT="0.5")
            for i, where in enumerate(why)
        ]
        for job, reason in zip(jobs, why.values(), strict=True):
            agent = job.agents[0]
            assert agent.wait() == 7, agent.log
            said = f"WARNING unicron job={job.name}_0 node=n0: {reason}; the job runs unprotected\n0 1\n"
            assert undated(agent.log) == said
            assert not list(agent.folder.glob("unicron-*"))


def test_where_the_admin_wants_no_job_protected_the_command_runs_unprotected(tmp_path):
    controller = Controller(tmp_path, '[partition.default]\nmode = "off"\n')
    job = Job(tmp_path, controller.address, "39", 1, [sys.executable, "-c", SHOW])
    try:
        assert job.agents[0].wait() == 7, job.agents[0].log
        said = 'partition default is "off" in the configuration of unicrond; the job runs unprotected'
        assert undated(job.agents[0].log) == f"WARNING unicron job={job.name}_0 node=n0: {said}\n0 1\n"
        assert controller.ask("status")["jobs"] == []
    finally:
        controller.close()


def test_unprotected_ranks_of_a_node_start_together_and_the_first_failure_ends_them(tmp_path):
    script = (
        "import os, sys, time\nlocal, world = os.environ['LOCAL_RANK'], os.environ['WORLD_SIZE']\n"
        "os.write(2, f'{local} {world}\\n'.encode())\n"  # at once, whatever the others write
    )
    fails = f"{script}sys.exit(5) if local == '1' else time.sleep(600)\n"
    job = Job(tmp_path, "", "40", 1, [sys.executable, "-c", fails], UNICRON_RANKS_PER_NODE="3")
    assert job.agents[0].wait() == 5, job.logs
    assert "1 3" in job.agents[0].log
    good = Job(tmp_path, "", "41", 1, [sys.executable, "-c", script], UNICRON_RANKS_PER_NODE="3")
    assert good.agents[0].wait() == 0, good.logs
    assert sorted(good.agents[0].log.splitlines()[1:]) == ["0 3", "1 3", "2 3"]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGUSR1, 9)])
def test_unprotected_ranks_get_the_agents_signals(tmp_path, number, code):
    script = (
        "import signal, sys, time\nsignal.signal(signal.SIGUSR1, lambda *_: sys.exit(9))\n"
        "print('up', flush=True)\ntime.sleep(600)\n"
    )
    job = Job(tmp_path, "", "42", 1, [sys.executable, "-c", script], UNICRON_RANKS_PER_NODE="2")
    agent = job.agents[0]
    try:
        wait_for(lambda: agent.log.count("up") == 2, lambda: agent.log)
        agent.process.send_signal(number)
        assert agent.wait() == code
    finally:
        job.close()


def run_agent(folder: Path, *words: str, **settings: str) -> subprocess.CompletedProcess[str]:
    environment = outside_slurm() | {"SLURM_JOB_ID": "50", "UNICRON_CONTROLLER": "tcp://127.0.0.1:9"} | settings
    return call(*AGENT, *words, cwd=folder, environment=environment)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"SLURM_JOB_ID": ""}, "no SLURM_JOB_ID: start unicron-agent inside a Slurm job"),
        ({"SLURM_JOB_ID": "x"}, "SLURM_JOB_ID='x' is not a job id"),
        ({"UNICRON_WEIGHT": "heavy"}, "UNICRON_WEIGHT='heavy' is no number"),
        ({"UNICRON_WEIGHT": "-1"}, "UNICRON_WEIGHT=-1 must be 1e-06 to 1e+06"),
        ({"UNICRON_WEIGHT": "1e308"}, "UNICRON_WEIGHT=1e308 must be 1e-06 to 1e+06"),
        ({"UNICRON_WEIGHT": "nan"}, "UNICRON_WEIGHT=nan must be 1e-06 to 1e+06"),
        ({"UNICRON_MIN_NODES": "1.5"}, "UNICRON_MIN_NODES='1.5' is no whole number"),
        ({"UNICRON_RANKS_PER_NODE": "0"}, "UNICRON_RANKS_PER_NODE=0 must be 1 to 1024"),
        ({"UNICRON_REGISTER_TIMEOUT": "soon"}, "UNICRON_REGISTER_TIMEOUT='soon' is no number"),
        ({"UNICRON_MODE": "fast"}, "UNICRON_MODE='fast': write auto, session or restart"),
        ({"SLURM_ARRAY_TASK_ID": "a"}, "SLURM_ARRAY_TASK_ID='a' is no whole number"),
    ],
)
def test_wrong_settings_are_one_clear_line(tmp_path, settings, says):
    done = run_agent(tmp_path, "run", "--", sys.executable, "-c", "raise SystemExit(7)", **settings)
    assert done.returncode == 2
    assert says in done.stderr and done.stderr.count("\n") == 1, done.stderr


NO_LINE, ONE_LINE = "", "unicron: this step runs unprotected: it has 8 tasks on a node"


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"SLURM_STEP_TASKS_PER_NODE": "1,8(x2)", "SLURM_PROCID": "0"}, ONE_LINE),
        ({"SLURM_STEP_TASKS_PER_NODE": "8(x2)", "SLURM_PROCID": "3"}, NO_LINE),
        ({"UNICRON_BY_DEFAULT": "1", "SLURM_ARRAY_TASK_ID": "4", "SLURM_ARRAY_JOB_ID": "49"}, NO_LINE),
        ({"UNICRON_BY_DEFAULT": "1", "SLURM_GPUS_ON_NODE": "8"}, NO_LINE),
        ({"UNICRON_BY_DEFAULT": "1", "UNICRON_MODE": "fast"}, NO_LINE),
        ({"UNICRON_BY_DEFAULT": "1", "UNICRON_WEIGHT": "heavy"}, NO_LINE),
    ],
)
def test_what_is_no_business_of_the_agents_runs_untouched(tmp_path, settings, said):
    """Defect: a task of an MPI step ended with 2 and did not run; a sweep's elements became one world."""
    show = "import os, msgspec; print(os.getpid(), sorted(n for n in os.environ if n in ('RANK', 'UNICRON')))"
    show += "; raise SystemExit(7)"
    done = run_agent(tmp_path, "run", "--", sys.executable, "-c", show, UNICRON="1", **settings)
    by_hand = "UNICRON_BY_DEFAULT" not in settings
    assert done.returncode == 7 and done.stdout.split(maxsplit=1)[1] == ("['UNICRON']\n" if by_hand else "[]\n")
    assert done.stderr.startswith(said) and done.stderr.count("\n") == bool(said), done.stderr


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["run", "--"], "no command: write `unicron-agent run -- python train.py ...`"),
        (["run", "--", "no-such-program"], "no-such-program: no such program on this node"),
        (["run", "--frobnicate", "python"], "No such option"),
        (["train"], "No such command 'train'"),
    ],
)
def test_wrong_commands_are_one_clear_line(tmp_path, words, says):
    done = run_agent(tmp_path, *words)
    assert done.returncode == 2
    assert says in done.stderr and done.stderr.count("\n") == 1, done.stderr


@pytest.mark.parametrize("hides", ["unicron.py", "unicron/__init__.py"])
def test_a_users_file_that_hides_unicrons_is_named(tmp_path, hides):
    beside = tmp_path / "scripts"
    (beside / hides).parent.mkdir(parents=True)
    (beside / hides).write_text("raise SystemExit('the wrong one')\n")
    (beside / "train.py").write_text("import unicron_transition.session.session\n")
    for words, where in ((["scripts/train.py"], tmp_path), (["-m", "train"], beside)):
        done = run_agent(where, "run", "--", sys.executable, *words)
        assert done.returncode == 2
        assert f"{beside / Path(hides).parts[0]} hides unicron's package" in done.stderr
        assert done.stderr.count("\n") == 1, done.stderr


def test_the_commands_own_options_are_left_alone(tmp_path):
    show = "import sys; print(sys.argv[1:]); sys.exit(3)"
    for words in (["run", "--"], ["run"]):
        done = run_agent(
            tmp_path,
            *words,
            sys.executable,
            "-c",
            show,
            "--help",
            "--controller",
            "x",
            "--",
            "-v",
            UNICRON_CONTROLLER="",
        )
        assert done.returncode == 3
        assert done.stdout == "['--help', '--controller', 'x', '--', '-v']\n"
