"""The SPANK plugin on a real Slurm. A small script stands in for the agent, so that the plugin alone is tested."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
import socket
import statistics
import subprocess
import sys
import threading
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path

import msgpack
import pytest

from tests.support.plugin_site import SOURCE, build, build_once
from tests.support.processes import ROOT, wait_for
from tests.support.small_root import add, make_root, plugin_line
from unicron_ctl.lab.cluster.local_cluster import LocalCluster

pytestmark = pytest.mark.slurm

SUBMISSION = ROOT / "docs" / "behaviour" / "submission.toml"
CALL_LIMIT = 20.0  # seconds for one Slurm command
# What srun says of a step that slurmctld lets wait, since it has not yet heard that the one before has ended.
WAITED = re.compile(
    r"^srun: (?:Job \d+ step creation \w+ disabled, retrying .*|Slurm is busy, step creation delayed"
    r"|Step completed in JobId=\d+, retrying|Step created for (?:job \d+|StepId=.*))\n",
    re.M,
)

# Records how it was called, then becomes the user's command, as `unicron-agent run --` would start it.
AGENT = """#!{python} -IS
import json, os, sys
name = f"{{os.environ['SLURM_JOB_ID']}}.{{os.environ['SLURM_STEP_ID']}}.{{os.environ['SLURM_PROCID']}}"
with open(os.path.join({folder!r}, name), "w") as file:
    json.dump({{"argv": sys.argv, "environment": dict(os.environ)}}, file)
for local, channel in enumerate(map(int, filter(None, os.environ.get("_UNICRON_TASKS", "").split(","))), 1):
    import socket
    channel = socket.socket(fileno=channel)
    channel.send(b"H")
    data, files, _, _ = socket.recv_fds(channel, 65536, 3)
    given = os.pread(files[2], 1 << 20, 0).split(b"\\0")
    mine = [word.decode() for word in given if word.startswith(b"SLURM_PROCID=")]
    os.write(files[0], f"out {{local}} {{mine}} {{data.decode().split()[0]}}\\n".encode())
    os.write(files[1], f"err {{local}}\\n".encode())
    play = os.environ["PLAY"].split(",")[local - 1]
    if play == "R":
        memory = os.memfd_create("environment")
        os.write(memory, b"".join(word + b"\\0" for word in given if word) + b"RANK=%d\\0" % local)
        socket.send_fds(channel, [b"R"], [memory])
    elif play:
        channel.send(play.encode())
    channel.detach()
os.execvp(sys.argv[3], sys.argv[3:])
"""


class Listener:
    """Stands in for the controller: keeps every datagram with the time at which it came."""

    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.bind(("127.0.0.1", 0))
        self.port = self._socket.getsockname()[1]
        self._received: list[tuple[float, dict]] = []
        self._changed = threading.Condition()
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while True:
            data = self._socket.recv(65536)
            if not data:
                return
            with self._changed:
                self._received.append((time.time(), msgpack.unpackb(data)))
                self._changed.notify_all()

    def messages(self, kind: str, slurm_id: int) -> list[dict]:
        return [m for _, m in self._received if m["kind"] == kind and m["slurm_id"] == slurm_id]

    def wait(self, kind: str, slurm_id: int, count: int = 1) -> list[dict]:
        """The messages of one job, once there are `count`; fails after a while."""
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.messages(kind, slurm_id)) >= count, timeout=5), (
                f"no {count} x {kind} for job {slurm_id} among {self._received}"
            )
            return self.messages(kind, slurm_id)

    def time_of(self, kind: str, slurm_id: int) -> float:
        self.wait(kind, slurm_id)
        return next(t for t, m in self._received if m["kind"] == kind and m["slurm_id"] == slurm_id)

    def close(self) -> None:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as last:
            last.sendto(b"", ("127.0.0.1", self.port))


@dataclasses.dataclass
class Bench:
    """A cluster with the plugin, and what its stand-ins have seen."""

    cluster: LocalCluster
    listener: Listener
    folder: Path
    plugin: Path
    agent: Path

    def line(self, *arguments: str, mode: str = "optional", controller: str = "", agent: str = "") -> str:
        controller = controller or f"tcp://127.0.0.1:{self.listener.port}"
        return f"{mode} {self.plugin} agent={agent or self.agent} controller={controller} {' '.join(arguments)}"

    def load(self, *lines: str) -> None:
        """Replaces plugstack.conf; srun and slurmstepd read it at each start."""
        (self.cluster.layout.etc_dir / "plugstack.conf").write_text("".join(line + "\n" for line in lines))

    def call(self, *command: str, **environment: str) -> subprocess.CompletedProcess[str]:
        clean = {k: v for k, v in os.environ.items() if not k.startswith(("UNICRON", "SLURM", "SBATCH"))}
        return subprocess.run(
            command,
            env=clean | self.cluster.env() | environment,
            capture_output=True,
            text=True,
            timeout=CALL_LIMIT,
            cwd=self.folder,
            stdin=subprocess.DEVNULL,
        )

    def batch(
        self, script: str, *options: str, elements: tuple[int, ...] = (), last: str = "END"
    ) -> tuple[int, dict[int, str]]:
        """Submits a script and waits for its `last` line: job id, and the output by element (0 without an array)."""
        path = self.folder / f"script{time.monotonic_ns()}"
        path.write_text(f"#!/bin/sh\n#SBATCH -N1\n{script}\necho END\n")
        array = ["--array=" + ",".join(map(str, elements))] if elements else []
        output = f"{path.name}.%a" if elements else f"{path.name}.0"
        done = self.call("sbatch", "--parsable", *array, "-o", output, *options, path.name)
        assert done.returncode == 0, done.stderr
        files = {element: self.folder / f"{path.name}.{element}" for element in elements or (0,)}
        wait_for(
            lambda: all(f.exists() and f.read_text().endswith(f"{last}\n") for f in files.values()), "the scripts' end"
        )
        return int(done.stdout), {element: WAITED.sub("", f.read_text()) for element, f in files.items()}

    def record(self, job: int | str, step: int = 0, task: int = 0) -> dict:
        return json.loads((self.folder / "seen" / f"{job}.{step}.{task}").read_text())

    def recorded(self, job: int | str) -> list[str]:
        return sorted(path.name for path in (self.folder / "seen").glob(f"{job}.*"))


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    folder = tmp_path_factory.mktemp("spank")
    plugin = build_once(folder / "build")
    (folder / "seen").mkdir()
    shutil.copy(Path("/bin/sh").resolve(), folder / PROGRAM)
    agent = folder / "agent"
    agent.write_text(AGENT.format(python=sys.executable, folder=str(folder / "seen")))
    agent.chmod(0o755)
    task_prolog = folder / "task_prolog"
    task_prolog.write_text("#!/bin/sh\necho export FROM_TASK_PROLOG=yes\n")
    task_prolog.chmod(0o755)

    listener = Listener()
    bench = Bench(LocalCluster(folder / "cluster"), listener, folder, plugin, agent)
    bench.cluster = LocalCluster(
        folder / "cluster",
        nodes=2,
        auth="none",
        plugstack_lines=[bench.line()],
        config_lines=[f"TaskProlog={task_prolog}", "JobRequeue=0"],
    )
    bench.cluster.up()
    try:
        yield bench
    finally:
        bench.cluster.down()
        listener.close()


@pytest.fixture(autouse=True)
def usual_plugstack_and_sound_nodes(bench: Bench) -> Iterator[None]:
    """Whatever a test does to the plugin, no node may be drained for it, and every node serves again at once."""
    bench.load(bench.line("config=/etc/unicron/unicron.toml"))
    yield
    wait_for(lambda: all(node.states == {"IDLE"} for node in bench.cluster.client().nodes()), "all nodes are idle")
    assert [node.reason for node in bench.cluster.client().nodes()] == ["", ""]


PROGRAM = "./program"  # a shell that nobody knows as one: it may train
SHOW = "echo $SLURM_JOB_ID; env | grep ^UNICRON | sort"


def test_srun_runs_the_command_under_the_agent(bench: Bench) -> None:
    done = bench.call("srun", "--unicron", "--unicron-weight=2.5", PROGRAM, "-c", SHOW)
    job, *shown = done.stdout.split("\n")[:-1]
    assert done.returncode == 0 and done.stderr == ""
    assert shown == [
        "UNICRON=1",
        "UNICRON_CONFIG=/etc/unicron/unicron.toml",
        f"UNICRON_CONTROLLER=tcp://127.0.0.1:{bench.listener.port}",
        "UNICRON_MODE=auto",
        "UNICRON_WEIGHT=2.5",
    ]
    seen = bench.record(job)
    assert seen["argv"] == [str(bench.agent), "run", "--", PROGRAM, "-c", SHOW]
    assert seen["environment"]["UNICRON_WEIGHT"] == "2.5" and "UNICRON_LAUNCH_AGENT" not in seen["environment"]


def test_without_the_option_nothing_happens(bench: Bench) -> None:
    done = bench.call("srun", PROGRAM, "-c", SHOW)
    job = done.stdout.strip()
    assert done.returncode == 0 and done.stderr == "" and "UNICRON" not in job
    assert bench.recorded(job) == []
    # A later job's hint has come, so this one's would have.
    other = bench.call("srun", "--unicron", PROGRAM, "-c", "echo $SLURM_JOB_ID").stdout.strip()
    bench.listener.wait("task_exit", int(other))
    assert not bench.listener.messages("task_exit", int(job))


def test_what_slurm_does_after_task_init_still_happens(bench: Bench) -> None:
    command = "ulimit -n 777; exec srun --unicron ./program -c 'ulimit -n; echo $FROM_TASK_PROLOG; echo $SLURM_JOB_ID'"
    limit, exported, job = bench.call("sh", "-c", command).stdout.split()
    assert (limit, exported) == ("777", "yes")
    assert len(bench.recorded(job)) == 1


def test_what_the_user_set_is_kept(bench: Bench) -> None:
    mine = {"UNICRON_CONTROLLER": f"tcp://localhost:{bench.listener.port}", "UNICRON_CONFIG": "/mine"}
    done = bench.call("srun", "--unicron", PROGRAM, "-c", SHOW, **mine)
    assert set(done.stdout.split("\n")) >= {f"{name}={value}" for name, value in mine.items()}
    # The hints go where the user's agent reports to; a name of a host is looked up for it.
    assert bench.listener.wait("task_exit", int(done.stdout.split()[0]))


@pytest.mark.parametrize(
    ("options", "environment", "agents"),
    [
        ([], {"UNICRON": "1", "UNICRON_WEIGHT": "3", "UNICRON_MIN_NODES": "2"}, 1),
        (["--unicron-min-nodes=2", "--unicron-weight=3"], {}, 1),
        (["--unicron-mode=restart", "--unicron-min-nodes=2"], {"UNICRON_WEIGHT": "3", "UNICRON_MODE": "session"}, 1),
        (["--no-unicron"], {"UNICRON": "1"}, 0),
        (["--unicron-weight=3", "--no-unicron"], {}, 0),
        ([], {"UNICRON_WEIGHT": "3"}, 0),
        (["--unicron"], {"UNICRON": "0", "UNICRON_WEIGHT": "3", "UNICRON_MIN_NODES": "2"}, 1),
    ],
)
def test_options_beat_the_environment(
    bench: Bench, options: list[str], environment: dict[str, str], agents: int
) -> None:
    done = bench.call("srun", *options, PROGRAM, "-c", SHOW, **environment)
    job = done.stdout.split()[0]
    assert done.returncode == 0 and len(bench.recorded(job)) == agents
    if agents:
        mode = "restart" if "--unicron-mode=restart" in options else "auto"
        assert f"UNICRON_MIN_NODES=2\nUNICRON_MODE={mode}\nUNICRON_WEIGHT=3\n" in done.stdout
    elif options:
        assert "UNICRON=0\n" in done.stdout


@pytest.mark.parametrize(
    ("options", "environment", "spares"),
    [
        (["--unicron-spares=1"], {"UNICRON_SPARES": "2"}, "1"),
        (["--unicron"], {"UNICRON_SPARES": "2"}, "2"),
        (["--unicron"], {}, ""),
    ],
)
def test_the_number_of_spares_reaches_the_agent(
    bench: Bench, options: list[str], environment: dict[str, str], spares: str
) -> None:
    done = bench.call("srun", *options, PROGRAM, "-c", "echo spares=$UNICRON_SPARES", **environment)
    assert done.stdout == f"spares={spares}\n"


def test_modules_to_import_are_handed_on(bench: Bench) -> None:
    for option, environment in (("--unicron-preload=torch,a.b", {"UNICRON_PRELOAD": "other"}), ("--unicron", {})):
        done = bench.call("srun", option, PROGRAM, "-c", SHOW, **environment)
        assert done.returncode == 0
        assert ("UNICRON_PRELOAD=torch,a.b\n" in done.stdout) is (option != "--unicron")


@pytest.mark.parametrize("command", [["srun", "hostname"], ["sbatch", "--wrap=hostname"], ["salloc", "hostname"]])
@pytest.mark.parametrize(
    ("option", "environment", "advice"),
    [
        ("--unicron-weight=0", {}, "--unicron-weight=0: write a number above 0"),
        ("--unicron-min-nodes=1.5", {}, "--unicron-min-nodes=1.5: write a whole number from 1"),
        ("--unicron-mode=fast", {}, "--unicron-mode=fast: write auto, session or restart"),
        ("--unicron-spares=-1", {}, "--unicron-spares=-1: write a whole number from 0"),
        ("--unicron-preload=a;b", {}, "--unicron-preload=a;b: write names of modules"),
        ("--unicron", {"UNICRON_WEIGHT": "nan"}, "UNICRON_WEIGHT=nan: write a number above 0"),
        ("--no-unicron", {"UNICRON": "yes"}, "UNICRON=yes: write UNICRON=1 or UNICRON=0"),
    ],
)
def test_bad_values_are_refused_at_submission(
    bench: Bench, command: list[str], option: str, environment: dict[str, str], advice: str
) -> None:
    done = bench.call(command[0], option, *command[1:], **environment)
    assert done.returncode != 0 and done.stdout == ""
    lines = [line for line in done.stderr.splitlines() if "unicron: " in line]
    assert len(lines) == 1 and f"unicron: couldn't use {advice}" in lines[0]
    assert {element.name for element in bench.cluster.client().elements()}.isdisjoint({"hostname", "wrap"})


def test_exit_codes_come_through(bench: Bench) -> None:
    for command, code, status in (("exit 7", 7, 7 << 8), ("kill -9 $$", 137, 9), ("exit 0", 0, 0)):
        # Through a file: srun may drop what a task printed right before it was killed.
        done = bench.call("srun", "--unicron", PROGRAM, "-c", f"echo $SLURM_JOB_ID > job; {command}")
        assert done.returncode == code
        (message,) = bench.listener.wait("task_exit", job := int((bench.folder / "job").read_text()))
        assert message == {
            "v": 1,
            "kind": "task_exit",
            "job": str(job),
            "element": 0,
            "slurm_id": job,
            "node": message["node"],
            "status": status,
        }
        assert message["node"] in ("n1", "n2")


def test_each_node_reports_under_its_own_name(bench: Bench) -> None:
    done = bench.call("srun", "--unicron", "-N2", PROGRAM, "-c", "echo $SLURM_JOB_ID")
    job = int(done.stdout.split()[0])
    assert {m["node"] for m in bench.listener.wait("task_exit", job, count=2)} == {"n1", "n2"}
    assert bench.recorded(job) == [f"{job}.0.0", f"{job}.0.1"]


def test_batch_job_array(bench: Bench) -> None:
    script = (
        "#SBATCH --unicron --unicron-min-nodes=3\nenv | grep ^UNICRON=\n"
        "srun ./program -c 'echo min $UNICRON_MIN_NODES'\necho $SLURM_JOB_ID"
    )
    array, output = bench.batch(script, elements=(3, 5))
    for element, text in output.items():
        mark, minimum, slurm_id, _ = text.splitlines()
        assert (mark, minimum) == ("UNICRON=1", "min 3")
        assert bench.recorded(slurm_id) == [f"{slurm_id}.0.0"]  # the step, not the batch script
        (message,) = bench.listener.wait("task_exit", int(slurm_id))
        assert (message["job"], message["element"]) == (str(array), element)


def test_nested_srun_can_change_its_mind(bench: Bench) -> None:
    script = "srun --no-unicron ./program -c 'echo $UNICRON'\n"
    script += "srun --unicron-weight=9 ./program -c 'echo $UNICRON $UNICRON_WEIGHT'"
    job, output = bench.batch(script, "--unicron")
    assert output[0].splitlines() == ["0", "1 9", "END"]
    assert bench.recorded(job) == [f"{job}.1.0"]
    job, output = bench.batch(
        "srun --unicron ./program -c 'echo $UNICRON'; srun ./program -c 'echo $UNICRON'", "--no-unicron"
    )
    assert output[0].splitlines() == ["1", "0", "END"]
    assert bench.recorded(job) == [f"{job}.0.0"]


# ---------------------------------------------------------------- which steps get an agent
PYTHON = ("python3", "-c", "import os; print(os.environ['SLURM_JOB_ID'], os.environ.get('UNICRON', '-'))")


def test_default_on(bench: Bench) -> None:
    bench.load(bench.line("default=on"))
    protected = bench.call("srun", *PYTHON).stdout.split()
    plain = bench.call("srun", "--no-unicron", *PYTHON).stdout.split()
    asked = bench.call("srun", "--unicron", *PYTHON).stdout.split()
    assert protected[1] == "1" and len(bench.recorded(protected[0])) == 1
    assert bench.record(protected[0])["environment"]["UNICRON_BY_DEFAULT"] == "1"
    assert plain[1] == "0" and bench.recorded(plain[0]) == []
    assert asked[1] == "1" and "UNICRON_BY_DEFAULT" not in bench.record(asked[0])["environment"]


def test_default_on_in_a_batch_script(bench: Bench) -> None:
    """What the default decided for the script is no word of the user's for its steps."""
    bench.load(bench.line("default=on"))
    script = f"echo ${{UNICRON:-none}}\nsrun hostname\nsrun ./train; srun {PYTHON[0]} -c 'print(7)'"
    (bench.folder / "train").write_text("#!/bin/sh\nexec python3 -c 'print(6)'\n")
    (bench.folder / "train").chmod(0o755)
    job, output = bench.batch(script)
    assert output[0].splitlines() == ["none", socket.gethostname(), "6", "7", "END"]
    assert bench.recorded(job) == [f"{job}.1.0", f"{job}.2.0"]
    assert bench.record(job, 2)["environment"]["UNICRON_BY_DEFAULT"] == "1"


@pytest.mark.parametrize("option", ["default=on", "--unicron"])
@pytest.mark.parametrize(
    ("options", "command", "tasks", "said"),
    [
        (["-N2"], ["hostname"], 2, ""),
        (["-N1"], ["env", "A=1", "printenv", "SLURM_JOB_ID"], 1, ""),
        (
            ["-N2", "--ntasks-per-node=2"],
            [PROGRAM, "-c", "echo rank $SLURM_PROCID of $SLURM_NTASKS"],
            4,
            "2 tasks on a node, as programs of MPI have",
        ),
        (["-N2", "-n3"], ["python3", "-c", "print(1)"], 3, "2 tasks on one node and 1 on another"),
    ],
)
def test_steps_that_are_no_training_run_untouched(
    bench: Bench, option: str, options: list[str], command: list[str], tasks: int, said: str
) -> None:
    """Defect: with default=on a step of several tasks a node, all of MPI, ended with 2 and did not run, and each helper
    was a registration."""
    bench.load(bench.line(option if "=" in option else ""))
    asked, agents = [] if "=" in option else [option], len(list((bench.folder / "seen").iterdir()))
    done = bench.call("srun", *asked, *options, *command)
    assert done.returncode == 0 and len(done.stdout.splitlines()) == tasks
    lines = [line for line in done.stderr.splitlines() if "unicron" in line]
    assert len(lines) == (1 if asked and said else 0) and all(said in line for line in lines), done.stderr
    if "NTASKS" in command[-1]:
        assert sorted(done.stdout.splitlines()) == [f"rank {rank} of 4" for rank in range(4)]
    assert agents == len(list((bench.folder / "seen").iterdir()))


def test_the_tasks_of_a_node_are_the_ranks_of_one_agent(bench: Bench) -> None:
    """The stand-in is the agent of three ranks: the others end as it says, each with its rank's output."""
    show = "import os; print('command of', os.environ.get('RANK')); raise SystemExit(7)"
    command = ["srun", "--unicron", "-l", "-N1", "--ntasks-per-node=4", "python3", "-c", show]
    done = bench.call(*command, PLAY="E3,E-15,R")
    assert done.returncode == 143 and sorted(done.stdout.splitlines()) == [
        "0: command of None",
        "1: out 1 ['SLURM_PROCID=1'] " + ",".join(map(str, sorted(os.sched_getaffinity(0)))),
        "2: out 2 ['SLURM_PROCID=2'] " + ",".join(map(str, sorted(os.sched_getaffinity(0)))),
        "3: command of 3",
        "3: out 3 ['SLURM_PROCID=3'] " + ",".join(map(str, sorted(os.sched_getaffinity(0)))),
    ]
    assert {f"{task}: err {task}" for task in (1, 2, 3)} <= set(done.stderr.splitlines())
    for told in ("task 1: Exited with exit code 3", "task 2: Terminated", "Exited with exit code 7"):
        assert told in done.stderr
    (record,) = list((bench.folder / "seen").iterdir())[-1:]
    job = max(int(path.name.split(".")[0]) for path in record.parent.iterdir())
    assert bench.recorded(job) == [f"{job}.0.0"] and len(bench.listener.wait("task_exit", job)) == 1


@pytest.mark.parametrize(
    ("agent", "said", "code"),
    [
        ("#!/bin/sh\nsleep 0.2; kill -9 $$\n", ": Killed", 137),  # they end with it, and nothing hangs
        ("#!/nonexistent/interpreter\n", "the command runs unprotected", 5),
    ],
)
def test_tasks_whose_agent_dies_or_never_was(bench: Bench, agent: str, said: str, code: int) -> None:
    other = bench.folder / f"agent{code}"
    other.write_text(agent)
    other.chmod(0o755)
    bench.load(bench.line(agent=str(other)))
    script = (
        "import os; print('task', os.environ['SLURM_PROCID'], [n for n in os.environ if 'UNICRON_TASK' in n]); exit(5)"
    )
    done = bench.call("srun", "--unicron", "-N1", "-n2", "python3", "-c", script)
    assert done.returncode == code and said in done.stderr, done.stderr
    assert sorted(done.stdout.splitlines()) == (["task 0 []", "task 1 []"] if code == 5 else [])


def test_a_batch_script_learns_what_it_lacks(bench: Bench) -> None:
    """A training without srun has no agent; a step that outlives a node is to be asked for; a restart's step numbers
    are not those of the script before it, whose srun may come back with a lost node and cancel by number. It is
    requeued, and adds to its log, though nobody has said so."""
    script = bench.folder / "lacks"
    script.write_text(
        "#!/bin/sh\necho $SLURM_NO_KILL $UNICRON_FIRST_STEP; srun -n1 -N1 printenv SLURM_STEP_ID\n"
        "python3 -c 'print(5)'; test -n \"$SLURM_RESTART_COUNT\" || sleep 60; echo END\n"
    )
    output = bench.folder / "lacks.out"
    done = bench.call("sbatch", "--parsable", "--unicron", "-N2", "-o", output.name, script.name)
    assert done.stderr == ""
    warning = "unicron: nothing protects this job, for no srun in its script starts a training: "
    warning += "write `srun python3 ...`"
    job, lines = done.stdout.strip(), lambda: output.read_text().splitlines() if output.exists() else []
    wait_for(lambda: lines() == [warning, "set", "0", "5"], "the script runs", now=lines)
    assert bench.call("scontrol", "requeue", job).returncode == 0
    time.sleep(1.2)  # slurmd takes what is issued in the second of a requeue for revoked, and the job fails

    def again() -> bool:
        bench.call("scontrol", "update", f"jobid={job}", "StartTime=now")
        return lines()[-5:] == [warning, "set 1", "1", "5", "END"] and lines()[:4] == [warning, "set", "0", "5"]

    wait_for(again, "it runs again", now=lambda: (lines(), bench.call("scontrol", "show", "job", job).stdout))
    job, text = bench.batch("srun true; env python3 -c 'print(5)'", "--no-unicron")
    assert text[0] == "5\nEND\n" and "Requeue=0" in bench.call("scontrol", "show", "job", str(job)).stdout
    for options, said in (
        ((), "give sbatch --requeue --open-mode=append --no-kill"),
        (("--requeue",), "sbatch --open-m"),
        (("--no-requeue", "-k"), "sbatch --open-mode=append\n"),
    ):
        command = f"echo '#!/bin/sh\n#SBATCH --unicron\nhostname' | sbatch {' '.join(options)}"
        done = bench.call("sh", "-c", command)
        assert done.returncode == 0 and said in done.stderr, done.stderr


@pytest.mark.parametrize("unicron", [(), ("--unicron",), ("#SBATCH --unicron",)], ids=["without", "option", "script"])
def test_what_the_user_says_of_requeue_log_and_lost_nodes_counts(bench: Bench, unicron: tuple[str, ...]) -> None:
    """Defect: sbatch takes a variable before what the script says, so that the plugin's beat #SBATCH --no-requeue."""
    in_script = [word for word in unicron if word.startswith("#")]
    usual = {"requeue": "requeue", "open_mode": "a", "no_kill": "set"} if unicron else {}
    script = bench.folder / "said"
    for case in tomllib.loads(SUBMISSION.read_text())["case"]:
        script.write_text("\n".join(["#!/bin/sh", *in_script, *case.get("script", []), "true", ""]))
        options = [*set(unicron).difference(in_script), *case.get("options", [])]
        done = bench.call(
            *("sbatch", "-vv", "--hold", "-o", "/dev/null", *options, script.name), **case.get("environment", {})
        )
        assert done.returncode == 0 and "unicron:" not in done.stderr, done.stderr
        shown = dict(re.findall(r"^sbatch: (\S+) +: (.*)$", done.stderr, re.M))
        said = {name: shown.get(name.replace("_", "-")) for name in ("requeue", "open_mode", "no_kill")}
        said["requeue"] = said["requeue"] or shown.get("no-requeue")
        expected = usual | {name: case[name] for name in said if name in case}
        assert {name: value for name, value in said.items() if value} == expected, case
        job = re.findall(r"\d+", done.stdout)[-1]
        requeues = f"Requeue={int(expected.get('requeue') == 'requeue')}"  # JobRequeue=0
        assert requeues in bench.call("scontrol", "show", "job", job).stdout, case
        assert bench.call("scancel", job).returncode == 0


def test_a_batch_script_with_mpirun_or_a_server_is_not_told_to_write_srun_before_it(bench: Bench) -> None:
    """Defects: `srun mpirun` starts an mpirun for each task, and a server that srun starts is no training."""
    (bench.folder / "mpirun").write_text("#!/bin/sh\necho ranks\n")
    (bench.folder / "mpirun").chmod(0o755)
    serves = "timeout 0.2 python3 -m http.server --bind 127.0.0.1 0 2> /dev/null > /dev/null"
    instead = "unless they use MPI, let srun start them, without mpirun and its host file "
    instead += "(`srun --ntasks-per-node=N python train.py`), or write `srun --ntasks-per-node=1 torchrun ...`"
    client = "if `python3 ...` trains, and is no client of `http.server`, write `srun python3 ...`"
    nothing, no_srun = "unicron: nothing protects this job, for", "no srun in its script starts a training:"
    for script, said in (
        (
            "./mpirun -np 8 --hostfile h apptainer exec i.sif python t.py",
            f"{nothing} mpirun starts its ranks: {instead}",
        ),
        ("python3 -c pass; nice ./mpirun ./solver", f"{nothing} mpirun starts its ranks: {instead}"),
        (serves, "unicron: `http.server` is no training, and runs as it is"),
        (f"srun {serves}", "unicron: `http.server` is no training, and runs as it is"),
        (f"srun {serves} & python3 -c pass", f"{nothing} {no_srun} {client}"),
    ):
        job, text = bench.batch(script, "--unicron")
        lines = [line for line in text[0].splitlines() if line.startswith("unicron")]
        assert lines == [said] and bench.recorded(job) == [], text[0]
    job, text = bench.batch("srun --ntasks-per-node=2 python3 -c pass", "--unicron", "--ntasks-per-node=2")
    assert "unicron:" not in text[0] and bench.recorded(job) == [f"{job}.0.0"], "what the line says is protected"


def test_a_script_that_names_one_large_file_for_ever_harms_no_node(bench: Bench) -> None:
    """Reading that file for each of the script's 10,000 words took an hour, in slurmstepd and before the job had a
    process, and the node was drained when the job was cancelled. A batch script, and the script that a step runs."""
    (bench.folder / "large").write_text("srun" * 16300)
    (bench.folder / "words").write_text("#!/bin/sh\n" + (": " + "large " * 10 + "\n") * 1000 + "echo end\n")
    output = bench.folder / "words.out"
    done = bench.call("sbatch", "--parsable", "--unicron", "-N1", "-o", output.name, "words")
    assert done.returncode == 0, done.stderr
    wait_for(lambda: output.exists() and "end\n" in output.read_text(), "the script runs")
    done = bench.call("srun", "--unicron", "-N1", "sh", "words")
    assert done.returncode == 0 and done.stdout == "end\n", done.stderr


def test_exit_codes_of_untouched_steps_come_through(bench: Bench) -> None:
    bench.load(bench.line("default=on"))
    for command, code in ((["false"], 1), (["sh", "-c", "exit 7"], 7)):
        done = bench.call("srun", *command)
        assert done.returncode == code and "unicron" not in done.stderr
    done = bench.call("srun", "--unicron", "false")
    assert done.returncode == 1 and "unicron" not in done.stderr


def test_the_training_is_the_job_and_not_the_helper_before_it(bench: Bench) -> None:
    script = (
        "ip=$(srun -N1 -n1 hostname)\nsrun mkdir made\nsrun --overlap top -b -d 1 -n 3 > /dev/null &\n"
        f"srun --overlap {PYTHON[0]} -c 'print(5)'\nwait\necho $ip; ls -d made; rmdir made"
    )
    job, output = bench.batch(script, "--unicron")
    assert output[0].splitlines() == ["5", socket.gethostname(), "made", "END"]
    assert (
        len(bench.recorded(job)) == 1
        and bench.record(job, int(bench.recorded(job)[0].split(".")[1]))["argv"][3] == "python3"
    )
    assert len(bench.listener.messages("task_exit", job)) == 1


def test_ten_helper_steps_run_once_for_each_task(bench: Bench) -> None:
    """None of them is a training, and none is told so. The shell's might have been, so the job is told that none was
    protected."""
    (bench.folder / "data").write_text("7\n")
    script = (
        "ip=$(srun -N1 -n1 hostname); echo ip $ip\nsrun -n1 -N1 mkdir -p made; ls -d made\nsrun -n4 cat data\n"
        "srun -N1 -n1 cp data made/; ls made\nsrun --overlap -N1 -n1 vmstat > /dev/null &\n"
        "srun -n4 sh -c 'echo mpi $SLURM_NTASKS'\n"
        "srun -N1 -n1 tar cf made/data.tar data; ls made\nsrun -N2 -n2 env FOO=3 printenv FOO\n"
        "srun -N2 -n2 true; echo true $?\nsrun -N1 -n1 false; echo false $?\nwait; rm -r made"
    )
    job, output = bench.batch(script, "--unicron", "-N2", "-n4", last="write `srun python train.py ...`")
    lines = [line for line in output[0].splitlines() if not line.startswith(("srun:", "unicron:"))]
    expected = [f"ip {socket.gethostname()}", "made", *["7"] * 4, "data", *["mpi 4"] * 4, "data", "data.tar", "3", "3"]
    assert lines == [*expected, "true 0", "false 1", "END"] and bench.recorded(job) == []
    told = [line for line in output[0].splitlines() if line.startswith("unicron:")]
    assert len(told) == 1 and told[0].startswith("unicron: no step of this job was protected"), told


def test_one_node_of_several_is_no_training(bench: Bench) -> None:
    job, output = bench.batch("srun -N1 -n1 python3 -c 'print(1)' 2> said; cat said", "--unicron", "-N2")
    assert len(output[0].splitlines()) == 3, output
    first, second, _ = output[0].splitlines()
    assert first == "1" and "runs unprotected: it has 1 of the job's 2 nodes" in second and bench.recorded(job) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can change a task's root")
@pytest.mark.parametrize("there", ["neither", "a launcher that does not run"])
def test_a_command_in_a_container_runs_without_the_agent(bench: Bench, there: str) -> None:
    """Defect: pyxis came after Unicron, so the agent was found on the host and executed in the container."""
    root = make_root(bench.folder / "root")
    add(root, bench.folder / "task_prolog")
    if there != "neither":
        for path in (bench.agent, bench.plugin.parent / "unicron-launch"):
            (root / path.relative_to("/")).parent.mkdir(parents=True, exist_ok=True)
            (root / path.relative_to("/")).write_text("#!/nonexistent/interpreter\n")
            (root / path.relative_to("/")).chmod(0o755)
    bench.load(plugin_line(bench.folder / "container.so", root), bench.line())
    done = bench.call("srun", "--unicron", "/bin/program", "-c", "test -e /etc || echo contained; exit 3")
    assert done.stdout == "contained\n" and done.returncode == 3, done.stderr
    (line,) = [line for line in done.stderr.splitlines() if "unicron" in line]
    missing = "container has no such program" if there == "neither" else "that runs in this container"
    assert f"{missing}; ask the administrator to mount the agent's folder there (docs/containers.md)" in line
    assert line.endswith("it runs unprotected")


def test_the_link_of_the_plugin_comes_after_those_of_others() -> None:
    """plugstack.conf.d is read in alphabetical order, and what changes the task's root must come first."""
    (shipped,) = (SOURCE.parent / "plugstack.conf.d").iterdir()
    others = "pyxis.conf 50-pyxis.conf 99-pyxis.conf enroot.conf singularity-exec.conf x11.conf use-env.conf auks.conf "
    others += "lua.conf private-tmpdir.conf slurm-spank-x11.conf stunnel.conf tmpdir.conf Zlast.conf xalt.conf"
    assert sorted([shipped.name, *others.split()])[-1] == shipped.name
    assert f"/etc/slurm/plugstack.conf.d/{shipped.name} " in (SOURCE.parent / "README.md").read_text()


@dataclasses.dataclass
class Checked:
    """What `make check` has built in a folder, and said."""

    folder: Path
    done: subprocess.CompletedProcess[str]


@pytest.fixture(scope="module")
def checked(tmp_path_factory: pytest.TempPathFactory) -> Checked:
    folder = tmp_path_factory.mktemp("check")
    return Checked(folder, build(folder, "check"))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a name two addresses")
def test_a_hint_goes_to_every_address_of_the_controllers_name(bench: Bench, checked: Checked, tmp_path: Path) -> None:
    """The first is dead, as where the head's name has an address of IPv6 that leads nowhere."""
    assert checked.done.returncode == 0
    (tmp_path / "hosts").write_text("127.0.0.3 head\n127.0.0.1 head\n::1 head\n")
    inner = f"mount --bind {tmp_path}/hosts /etc/hosts && {checked.folder}/test_unit tcp://head:{bench.listener.port}"
    subprocess.run(["unshare", "--mount", "sh", "-c", inner], check=True, timeout=CALL_LIMIT)
    (message,) = bench.listener.wait("task_exit", 0)
    assert message["job"] == "1"


def test_an_agent_in_the_command_is_not_wrapped_again(bench: Bench) -> None:
    by_hand = bench.folder / "unicron-agent"
    by_hand.write_text("#!/bin/sh\necho $*\n")
    by_hand.chmod(0o755)
    done = bench.call("srun", "--unicron", str(by_hand), "run", "--", "hostname")
    assert done.stdout == "run -- hostname\n"


@pytest.mark.parametrize("kind", ["missing", "no program", "broken"])
def test_without_a_working_agent_the_command_runs_and_says_so(bench: Bench, kind: str) -> None:
    agent = bench.folder / kind.replace(" ", "-")
    if kind != "missing":
        agent.write_text("#!/nonexistent/interpreter\n")
        agent.chmod(0o755 if kind == "broken" else 0o644)
    # Root may not execute what nobody may execute either, so the three cases hold for every user.
    bench.load(bench.line(agent=str(agent)))
    done = bench.call("srun", "--unicron", PROGRAM, "-c", "echo works; exit 3")
    assert done.stdout == "works\n" and done.returncode == 3
    lines = [line for line in done.stderr.splitlines() if "unicron: " in line]
    assert len(lines) == 1 and str(agent) in lines[0] and "runs unprotected" in lines[0]


@pytest.mark.parametrize("controller", ["tcp://127.0.0.1:9", "tcp://no-such-host.invalid:7700", "tcp://[::1]:9"])
def test_a_controller_that_is_not_there_costs_nothing(bench: Bench, controller: str) -> None:
    bench.load(bench.line(controller=controller))
    began = time.monotonic()
    done = bench.call("srun", "--unicron", PROGRAM, "-c", "exit 4")
    assert done.returncode == 4 and "unicron" not in done.stderr
    assert time.monotonic() - began < 5


@pytest.mark.parametrize("mode", ["optional", "required"])
@pytest.mark.parametrize("argument", ["agnet=/x", "default=maybe"])
def test_a_bad_plugin_argument_turns_the_plugin_off(bench: Bench, mode: str, argument: str) -> None:
    bench.load(bench.line(argument, mode=mode))
    done = bench.call("srun", "--unicron", PROGRAM, "-c", "echo $SLURM_JOB_ID")
    assert done.returncode == 0 and bench.recorded(done.stdout.strip()) == []
    assert f'unicron: couldn\'t read the plugin argument "{argument}"' in done.stderr


def test_a_missing_plugin_that_is_optional_costs_nothing(bench: Bench) -> None:
    bench.load("optional /nonexistent/unicron.so")
    assert bench.call("srun", "echo", "works").stdout == "works\n"


def test_loaded_as_required(bench: Bench) -> None:
    bench.load(bench.line(mode="required"))
    job, output = bench.batch("srun ./program -c 'exit 5'; echo $?", "--unicron")
    assert output[0].splitlines()[-2:] == ["5", "END"] and bench.recorded(job) == [f"{job}.0.0"]


def test_an_exit_is_seen_within_50_ms(bench: Bench) -> None:
    delays = []
    for _ in range(5):
        bench.call("srun", "--unicron", PROGRAM, "-c", "{ echo $SLURM_JOB_ID; date +%s.%N; } > killed; kill -9 $$")
        job, killed_at = (bench.folder / "killed").read_text().split()
        delays.append(bench.listener.time_of("task_exit", int(job)) - float(killed_at))
    print(f"kill to datagram: {', '.join(f'{1000 * d:.1f}' for d in delays)} ms")
    assert 0 < statistics.median(delays) < 0.05


def test_help_shows_the_options(bench: Bench) -> None:
    for command in ("srun", "sbatch", "salloc"):
        text = bench.call(command, "--help").stdout
        assert "--unicron-weight=WEIGHT" in text and "--unicron-min-nodes=NODES" in text and "[unicron] " in text


def test_the_launcher_becomes_the_command_where_the_agent_is_no_program(bench: Bench, tmp_path: Path) -> None:
    """As it is called from Slurm 23.11 on: `unicron-launch AGENT COMMAND...`."""
    agent = tmp_path / "unicron-agent"

    def launch() -> subprocess.CompletedProcess[str]:
        command = [bench.plugin.with_name("unicron-launch"), agent, "sh", "-c", "echo $1; exit 3", "sh", "works"]
        return subprocess.run(command, capture_output=True, text=True, timeout=CALL_LIMIT)

    for text, mode in (("#!/nonexistent/interpreter\n", 0o755), ("no program", 0o755), ("#!/bin/sh\n", 0o644)):
        agent.write_text(text)
        agent.chmod(mode)
        done = launch()
        assert (done.stdout, done.returncode) == ("works\n", 3)
        assert f"unicron: couldn't start {agent}: " in done.stderr and "the command runs unprotected" in done.stderr
    agent.write_text("#!/bin/sh\necho $*\n")
    agent.chmod(0o755)
    assert launch().stdout == "run -- sh -c echo $1; exit 3 sh works\n"


@pytest.mark.parametrize(
    "prepends",
    [(), pytest.param(("CPPFLAGS=-DUNICRON_PREPENDS=1",), marks=pytest.mark.wide)],
    ids=["this Slurm", "23.11 on"],
)
def test_unit_tests_under_sanitizers(checked: Checked, tmp_path: Path, prepends: tuple[str, ...]) -> None:
    done = build(tmp_path, "check", *prepends) if prepends else checked.done
    assert done.returncode == 0, done.stderr
    *lines, last = done.stdout.splitlines()
    assert last == "ok"
    decoded = []
    for line in lines:
        kind, *argument, data = line.split()
        value = msgpack.unpackb(bytes.fromhex(data))
        decoded.append(kind)
        if kind == "int":
            assert value == int(argument[0])
        elif kind == "text":
            assert value == "x" * int(argument[0])
        elif kind == "notice":
            assert value == {
                "v": 1,
                "kind": "task_exit",
                "job": "4294967294",
                "element": 4000000,
                "slurm_id": 4294967294,
                "node": "n" * 255,
                "status": 9,
            }
        else:
            assert (value["job"], value["element"], value["node"], value["status"]) == ("42", 7, "node7", 9)
    assert sorted(set(decoded)) == ["int", "notice", "step", "text"] and decoded.count("int") == 20


def test_the_plugin_names_its_slurm_and_exports_nothing_else(bench: Bench) -> None:
    version = build(bench.plugin.parent, "version").stdout.strip()
    release = bench.call("srun", "--version").stdout.split()[1]
    assert version.endswith(f"built for Slurm {release}")
    assert version.encode() in bench.plugin.read_bytes()
    listed = subprocess.run(["nm", "-D", "--defined-only", bench.plugin], capture_output=True, text=True, check=True)
    names = {line.split()[-1] for line in listed.stdout.splitlines()} - {"spank_plugin_version"}  # SPANK_PLUGIN's own
    assert names and all(name.startswith(("plugin_", "slurm_spank_")) for name in names)


def test_install_and_uninstall(tmp_path: Path) -> None:
    build_once(tmp_path / "build")
    arguments = ["install", f"DESTDIR={tmp_path}/root", "PREFIX=/usr"]
    assert build(tmp_path / "build", *arguments).returncode == 0
    folder = tmp_path / "root" / "usr" / "lib" / "unicron"
    assert sorted(path.name for path in folder.iterdir()) == ["unicron-launch", "unicron.so"]
    assert os.access(folder / "unicron-launch", os.X_OK)
    assert build(tmp_path / "build", "uninstall", *arguments[1:]).returncode == 0
    assert list(folder.iterdir()) == []


def test_a_fault_while_a_command_is_read_harms_its_task_alone(bench: Bench, tmp_path: Path) -> None:
    """Words are read in the task's own process: slurmstepd, other steps and the node take no harm. The plugin is built
    as from what is installed: with its table beside it."""
    source = tmp_path / "spank"
    shutil.copytree(SOURCE, source, ignore=shutil.ignore_patterns("*.o", "*.d", "*.so", "*.inc"))
    shutil.copy(ROOT / "unicron_ctl/unicron_ctl/agent/programs.toml", source)
    head = "struct command command_of(char *const argv[], bool reads_text)\n{\n"
    text = (source / "command.c").read_text()
    assert head in text
    fault = 'if (strcmp(base_name(argv[0]), "faulty") == 0)\nabort();\n'
    (source / "command.c").write_text(text.replace(head, head + fault))
    made = subprocess.run(["make", "-s", "-C", source, "VERSION=0"], capture_output=True, text=True)
    assert made.returncode == 0, made.stderr
    bench.load(dataclasses.replace(bench, plugin=source / "unicron.so").line())
    shutil.copy("/bin/true", bench.folder / "faulty")
    steps = "srun --overlap -n1 sleep 3 &\nsrun --overlap -n1 ./faulty\necho faulty $?\nwait %1\necho beside $?"
    _, said = bench.batch(f"{steps}\nsrun --overlap -n1 ./program -c 'echo next $UNICRON'", "--unicron", "-n2")
    assert {"faulty 134", "beside 0", "next 1"} <= set(said[0].splitlines()), said[0]
