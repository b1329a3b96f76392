"""A real unicrond with scripted agents over real sockets: order of messages, restart in a recovery, hostile input,
its commands.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import msgpack
import pytest
import zmq

from unicron_ctl.errors import UserError
from unicron_ctl.protocol import wire
from unicron_ctl.protocol.client import ask

pytestmark = pytest.mark.process
REPOSITORY = Path(__file__).resolve().parents[2]
LIMIT = 10.0
CONFIG = """
[controller]
auth = "none"
slurm = "none"
heartbeat_period = 0.4
forming_settle_seconds = 0.5
restart_grace = 2.0
"""
PATIENT = CONFIG.replace("period = 0.4", "period = 5.0").replace("grace = 2.0", "grace = 5.0")


class Controller:
    """A unicrond process with a state folder of its own."""

    def __init__(self, folder: Path, listen: str = "tcp://127.0.0.1:0", config: str = CONFIG) -> None:
        self.folder = folder
        (folder / "unicron.toml").write_text(config)
        self.start(listen)

    def start(self, listen: str) -> None:
        command = [
            sys.executable,
            "-m",
            "unicron_ctl.controller.main",
            "--config",
            str(self.folder / "unicron.toml"),
            "--listen",
            listen,
            "--state-dir",
            str(self.folder / "state"),
        ]
        self.process = subprocess.Popen(
            command, cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=(self.folder / "errors").open("ab"), text=True
        )
        line = self.process.stdout.readline()
        assert line.startswith("unicrond: listening on tcp://"), (self.folder / "errors").read_text()
        self.address = line.split()[-1]

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(5)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            assert self.process.wait(5) == 0, "SIGTERM ends it cleanly"
        self.process.stdout.close()

    def status(self) -> dict:
        return ask({"kind": "status"}, self.address)

    def job(self) -> dict:
        return self.status()["jobs"][0]

    def kinds(self) -> list[str]:
        return [event["kind"] for event in ask({"kind": "events", "limit": 1000}, self.address)]


@pytest.fixture
def controller(tmp_path, request):
    started = Controller(tmp_path, config=getattr(request, "param", CONFIG))
    yield started
    started.close()


class Agent:
    """A scripted agent of element `element` with one rank."""

    def __init__(self, address: str, element: int, nodes: int = 2) -> None:
        self.element, self.nodes = element, nodes
        self.name = f"agent{element}"
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.connect(address)
        self.rank = wire.RankStatus(state="starting", micro_batches=4, train_iterations=50)
        self.heard: list[wire.Message] = []

    def close(self) -> None:
        self.socket.close()
        self.context.term()

    def send(self, message: wire.Message) -> None:
        self.socket.send(wire.encode(message))

    def register(self) -> None:
        settings = wire.Settings(name="gpt", user="ann", max_nodes=self.nodes)
        self.send(
            wire.Register(
                job="7",
                element=self.element,
                agent=self.name,
                node=f"n{self.element}",
                address="127.0.0.1",
                slots=[self.element],
                settings=settings,
            )
        )

    def status(self, **changes) -> None:
        values = {name: getattr(self.rank, name) for name in wire.RankStatus.__struct_fields__}
        if changes:
            self.rank = wire.RankStatus(**{**values, **changes, "changed": time.time()})
        self.send(
            wire.Status(
                job="7",
                element=self.element,
                agent=self.name,
                sent=time.time(),
                store=f"127.0.0.1:{9000 + self.element}",
                ranks={self.element: self.rank},
            )
        )

    def expect(self, kind: type, *others: Agent, after: int = 0) -> wire.Message:
        """The next message of a kind; heartbeats of this and the other agents go on meanwhile."""
        deadline, beat = time.monotonic() + LIMIT, 0.0
        while time.monotonic() < deadline:
            for agent in (self, *others):
                if time.monotonic() - beat > 0.2:
                    agent.status()
                while agent.socket.poll(0):
                    message = wire.decode(agent.socket.recv(), wire.ToAgent)
                    agent.heard.append(message)
                    if isinstance(message, wire.Refused) and not message.final:
                        agent.register()
            if time.monotonic() - beat > 0.2:
                beat = time.monotonic()
            found = [m for m in self.heard if isinstance(m, kind) and (after == 0 or m.generation > after)]
            if found:
                return found[-1]
            time.sleep(0.005)
        raise AssertionError(f"no {kind.__name__} within {LIMIT:g} s; heard {[type(m).__name__ for m in self.heard]}")


@pytest.fixture
def agents(controller):
    made = [Agent(controller.address, element, 3) for element in range(3)]
    yield made
    for agent in made:
        agent.close()


def form(agents: list[Agent]) -> None:
    """A job that trains in generation 1."""
    for agent in agents:
        agent.register()
        agent.expect(wire.Welcome, *agents)
    for agent in agents:
        agent.status(state="waiting")
    for agent in agents:
        plan = agent.expect(wire.Plan, *agents)
        assert plan.members == [0, 1, 2] and plan.generation == 1
    for agent in agents:
        agent.status(state="running", generation=1)


def wait_for(condition, what: str) -> None:
    deadline = time.monotonic() + LIMIT
    while not condition():
        assert time.monotonic() < deadline, f"not within {LIMIT:g} s: {what}"
        time.sleep(0.02)


def test_a_death_leads_to_break_report_plan_and_running(controller, agents):
    form(agents)
    wait_for(lambda: controller.job()["state"] == "running", "the job runs")
    agents[2].status(state="exited", exit=wire.Exit(code=-9, at=time.time(), lived=5.0))
    for agent in agents[:2]:
        order = agent.expect(wire.Break, *agents)
        assert (order.generation, order.lost) == (1, [2])
    assert agents[2].expect(wire.StartRank, *agents).incarnation == 1
    agents[0].status(state="stopped", broken=1, done=[0], iteration=3)
    agents[1].status(state="stopped", broken=1, done=[1], iteration=3)
    plan = agents[1].expect(wire.Plan, *agents, after=1)
    assert plan.generation == 2 and plan.assignment == {0: [0, 2], 1: [1, 3]} and plan.iteration == 3
    for agent in agents[:2]:
        agent.status(state="running", generation=2)
    wait_for(lambda: controller.job()["state"] == "running", "all entered")
    failure = controller.status()["failures"][0]
    assert failure["kind"] == "rank" and failure["reused_micro_batches"] == 2
    assert failure["detected_at"] <= failure["broken_at"] <= failure["planned_at"] <= failure["resumed_at"]
    kinds = [kind for kind in controller.kinds() if kind in ("failure_detected", "break", "plan", "entered")]
    assert kinds == ["plan", "entered", "failure_detected", "break", "plan", "entered"]


def test_a_controller_killed_in_a_recovery_finishes_it_after_its_start(controller, agents):
    form(agents)
    wait_for(lambda: controller.job()["state"] == "running", "the job runs")
    agents[2].status(state="exited", exit=wire.Exit(code=1, at=time.time(), lived=5.0))
    agents[0].expect(wire.Break, *agents)
    agents[0].status(state="stopped", broken=1, done=[0, 3])
    controller.kill()
    controller.process.stdout.close()
    controller.start(controller.address)
    assert controller.job()["state"] == "breaking"
    agents[1].status(state="stopped", broken=1, done=[1])
    plan = agents[0].expect(wire.Plan, *agents, after=1)
    assert (
        plan.generation == 2
        and plan.members == [0, 1]
        and set(plan.assignment[0]) >= {0, 3}
        and 1 in plan.assignment[1]
    )


def test_a_silent_agent_is_lost(controller, agents):
    form(agents)
    wait_for(lambda: controller.job()["state"] == "running", "the job runs")
    order = agents[0].expect(wire.Break, agents[1])
    assert order.lost == [2]
    assert controller.status()["failures"][0]["kind"] == "node"


def test_hostile_input_is_counted_answered_and_survived(controller, agents):
    form(agents)
    peer = agents[0].context.socket(zmq.DEALER)
    peer.setsockopt(zmq.LINGER, 0)
    peer.connect(controller.address)
    hostile = [
        b"",
        b"\xc1",
        os.urandom(500),
        msgpack.packb({"kind": "status"}),
        msgpack.packb({"kind": "nothing", "v": 1}),
        b"\x81" * 2000,
        msgpack.packb({"kind": "ask", "v": 1, "what": 5}),
        msgpack.packb({"kind": "ask", "v": 99, "what": "status"}),
    ]
    for data in hostile:
        peer.send(data)
    peer.send(
        wire.encode(
            wire.Step(
                job="7",
                slot=0,
                generation=1,
                iteration=0,
                micro_batches=[0],
                computed=[0],
                total=4,
                seconds=0,
                loss=0,
                at=0,
            )
        )
    )
    peer.send(
        wire.encode(
            wire.Register(
                job="7",
                element=0,
                agent="x",
                node="n",
                address="a",
                slots=[9],
                settings=wire.Settings(name="a", user="b"),
            )
        )
    )
    answers = []
    while peer.poll(500):
        answers.append(peer.recv())
    assert len(answers) == len(hostile) + 1
    assert "protocol version 99" in wire.decode(answers[-2], wire.Answer).error
    peer.close()
    assert controller.kinds().count("bad_message") == 1, "one line per peer"
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as raw:
        host, _, port = controller.address.removeprefix("tcp://").rpartition(":")
        raw.connect((host, int(port)))
        raw.sendall(os.urandom(4096))
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as datagrams:
            for data in hostile:
                datagrams.sendto(data, (host, int(port)))
    assert controller.process.poll() is None
    assert controller.job()["iteration"] == -1, "a Step from somebody else's connection is not believed"


@pytest.mark.parametrize("controller", [PATIENT], indirect=True)
def test_a_hint_provokes_an_answer_and_silence_after_it_is_a_loss(controller, agents):
    form(agents)
    wait_for(lambda: controller.job()["state"] == "running", "the job runs")
    host, _, port = controller.address.removeprefix("tcp://").rpartition(":")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as datagrams:
        datagrams.sendto(
            wire.encode(wire.Hint(v=1, kind="task_exit", job="7", element=1, node="n1", status=9)), (host, int(port))
        )
    agents[1].expect(wire.Ping, *agents)
    agents[1].status()
    time.sleep(0.5)
    assert controller.job()["state"] == "running"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as datagrams:
        datagrams.sendto(
            wire.encode(wire.Hint(v=1, kind="task_exit", job="7", element=1, node="n1", status=9)), (host, int(port))
        )
    assert agents[0].expect(wire.Break, agents[2]).lost == [1]
    assert controller.status()["failures"][0]["detected_by"] == "task exit in Slurm"


def unicronctl(name: str, *arguments: str) -> subprocess.CompletedProcess:
    """Runs one command the way `unicronctl` does."""
    imports = f"import sys; from unicron_ctl.cli import run; from unicron_ctl.commands.{name} import command"
    program = f"{imports}; sys.exit(run('unicronctl', command))"
    return subprocess.run(
        [sys.executable, "-c", program, *arguments],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=20,
        check=False,
        env={**os.environ, "COLUMNS": "200"},
    )


@pytest.mark.parametrize("controller", [PATIENT], indirect=True)
def test_the_commands_show_it(controller, agents):
    form(agents)
    where = ["--controller", controller.address]
    data = json.loads(unicronctl("status", "--json", *where).stdout)
    assert set(data) >= {"controller", "jobs", "nodes", "failures", "waf"}
    assert {
        "job",
        "name",
        "state",
        "generation",
        "iteration",
        "iteration_seconds",
        "loss",
        "weight",
        "waf",
        "last_failure",
    } <= set(data["jobs"][0])
    assert "gpt" in unicronctl("status", *where).stdout
    assert json.loads(unicronctl("jobs", "--json", *where).stdout)[0]["job"] == "7"
    assert [node["node"] for node in json.loads(unicronctl("nodes", "--json", *where).stdout)] == ["n0", "n1", "n2"]
    kinds = [json.loads(line)["kind"] for line in unicronctl("events", "--json", *where).stdout.splitlines()]
    assert kinds[0] == "started" and "plan" in kinds
    assert "3 nodes" in json.loads(unicronctl("explain", "gpt", "--json", *where).stdout)["decisions"][0]["reason"]
    plan = json.loads(
        unicronctl("plan", "--live", "--if", "job gpt loses a node", "--explain", "gpt", "--json", *where).stdout
    )
    assert plan["assignment"] == {"7": 2} and plan["explanation"]["job"] == "7"
    assert "7 gpt" in unicronctl("plan", "--live", *where).stdout
    wrong = unicronctl("explain", "nobody", *where)
    assert wrong.returncode == 1 and wrong.stderr.count("\n") == 1 and "no job is called 'nobody'" in wrong.stderr


def test_errors_are_one_line_that_says_what_to_do(controller, tmp_path):
    with pytest.raises(UserError, match="no controller answers at tcp://127\\.0\\.0\\.1:1: start `unicrond`"):
        ask({"kind": "status"}, "tcp://127.0.0.1:1", timeout=0.3)
    second = subprocess.run(
        [
            sys.executable,
            "-m",
            "unicron_ctl.controller.main",
            "--config",
            str(controller.folder / "unicron.toml"),
            "--state-dir",
            str(controller.folder / "state"),
        ],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=20,
        check=False,
    )
    assert (
        second.returncode == 1
        and "another unicrond runs on this state folder" in second.stderr
        and second.stderr.count("\n") == 1
    )
    (tmp_path / "bad.toml").write_text("[controller]\nheartbeat_period = 60\n")
    bad = subprocess.run(
        [sys.executable, "-m", "unicron_ctl.controller.main", "--config", str(tmp_path / "bad.toml")],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=20,
        check=False,
    )
    assert bad.returncode == 2 and "enter_timeout" in bad.stderr and bad.stderr.count("\n") == 1


def test_a_reload_takes_a_good_file_and_keeps_the_old_one_for_a_bad_one(controller):
    written = controller.folder / "unicron.toml"
    written.write_text(CONFIG + "offer_delay = 0.5\n")
    controller.process.send_signal(signal.SIGHUP)
    wait_for(lambda: "configured" in controller.kinds(), "the reload")
    written.write_text(CONFIG + "offer_delay = 'soon'\n")
    controller.process.send_signal(signal.SIGHUP)
    wait_for(lambda: "not reloaded" in (controller.folder / "errors").read_text(), "the complaint")
    assert controller.process.poll() is None


def test_the_address_file_is_there_while_it_runs(tmp_path):
    started = Controller(tmp_path)
    assert (tmp_path / "state" / "address").read_text().strip() == started.address
    started.close()
    assert not (tmp_path / "state" / "address").exists()
