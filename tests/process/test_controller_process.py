"""A real unicrond with scripted agents over real sockets: order of messages, restart in a recovery, hostile input,
its commands.
"""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import socket
import subprocess
import sys
import termios
import time
from collections.abc import Callable

import msgpack
import pytest
import zmq

from tests.support.controller import COMMAND, Controller
from tests.support.processes import LIMIT, ROOT, call, outside_slurm, unicronctl, wait_for
from tests.support.scripted import ScriptedAgent, form
from unicron_ctl.shared.protocol import datagrams, structs, wire
from unicron_ctl.shared.protocol.client import ask_controller
from unicron_ctl.shared.protocol.reach import Reach
from unicron_ctl.shared.system.errors import UserError
from unicron_detector.formats import HINT

pytestmark = pytest.mark.process
PATIENT = "lease_periods = 40\n"
SHORT_LEASE = "heartbeat_period = 0.4\n"


@pytest.fixture
def controller(tmp_path, request):
    started = Controller(tmp_path, getattr(request, "param", PATIENT))
    yield started
    started.close()


@pytest.fixture
def agents(controller):
    made = [ScriptedAgent(controller.address, element, 3) for element in range(3)]
    yield made
    for agent in made:
        agent.close()


@pytest.fixture
def running(controller, agents):
    """The agents' job trains, and the controller knows it."""
    form(agents)
    wait(agents, lambda: controller.job()["state"] == "running", "the job runs")
    return agents


def wait(agents: list[ScriptedAgent], look: Callable[[], object], what: str) -> None:
    """Wait for something while the agents' heartbeats go on."""

    def turn() -> object:
        for agent in agents:
            agent.turn()
        return look()

    wait_for(turn, what)


def hint(controller: Controller, element: int) -> None:
    """What the plugin sends when a task has ended."""
    host, _, port = controller.address.removeprefix("tcp://").rpartition(":")
    message = datagrams.Hint(v=HINT.number, kind="task_exit", job="7", element=element, node=f"n{element}", status=9)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as udp:
        udp.sendto(wire.encode(message), (host, int(port)))


def test_a_death_leads_to_break_report_plan_and_running(controller, running):
    first, second, dying = running
    dying.status(state="exited", exit=structs.Exit(code=-9, at=time.time(), lived=5.0))
    for agent in (first, second):
        order = agent.expect(wire.Break, *running)
        assert (order.generation, order.lost) == (1, [2])
    assert dying.expect(wire.StartRank, *running).incarnation == 1
    first.status(state="stopped", broken=1, done=[0], iteration=3)
    second.status(state="stopped", broken=1, done=[1], iteration=3)
    for agent, share in ((first, {0: [0, 2]}), (second, {1: [1, 3]})):
        plan = agent.expect(wire.Plan, *running, after=1)
        assert (plan.generation, plan.members, plan.iteration, plan.assignment) == (2, [0, 1], 3, share)
    for agent in (first, second):
        agent.status(state="running", generation=2, iteration=3)
    wait(running, lambda: controller.job()["state"] == "running", "all entered")
    failure = controller.failures()[0]
    assert failure["kind"] == "rank" and failure["reused_micro_batches"] == 2
    assert failure["detected_at"] <= failure["broken_at"] <= failure["planned_at"] <= failure["resumed_at"]
    kinds = [event["kind"] for event in controller.events("failure_detected", "break", "plan", "entered")]
    assert kinds == ["plan", "entered", "failure_detected", "break", "plan", "entered"]


def test_the_steps_of_all_agents_make_an_iteration(controller, running):
    for agent, micro_batches in zip(running, ([0, 3], [1], [2]), strict=True):
        agent.steps(1, 0, micro_batches)
    wait(running, lambda: controller.job()["iteration"] == 0, "the first iteration")
    running[0].steps(1, 1, [0, 3])
    running[1].steps(1, 1, [3])
    running[2].steps(1, 1, [2])
    wait(running, lambda: controller.job()["ledger_violations"] == 1, "a micro-batch that is in two gradients")


def test_a_controller_killed_in_a_recovery_finishes_it_after_its_start(controller, running):
    first, second, dying = running
    dying.status(state="exited", exit=structs.Exit(code=1, at=time.time(), lived=5.0))
    first.expect(wire.Break, *running)
    first.status(state="stopped", broken=1, done=[0, 3])
    controller.kill()
    controller.start()
    assert controller.job()["state"] == "breaking"
    second.status(state="stopped", broken=1, done=[1])
    plan = first.expect(wire.Plan, *running, after=1)
    assert plan.generation == 2 and plan.members == [0, 1] and set(plan.assignment[0]) >= {0, 3}
    plan = second.expect(wire.Plan, *running, after=1)
    assert 1 in plan.assignment[1] and not {0, 3} & set(plan.assignment[1])


@pytest.mark.parametrize("controller", [SHORT_LEASE], indirect=True)
def test_a_silent_agent_is_lost_once_others_do_not_reach_it_either(controller, running):
    first, second, _ = running
    wait([first, second], lambda: controller.events("silence"), "it is silent")
    assert controller.failures() == [], "others reach it"
    first.reaches = second.reaches = Reach.SILENT
    order = first.expect(wire.Break, second)
    assert order.lost == [2]
    failure = controller.failures()[0]
    assert (failure["kind"], failure["detected_by"]) == ("node", "lease and witnesses")


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
    step = structs.RankStep(slot=0, micro_batches=[0], seconds=0.1, loss=0.0)
    peer.send(
        wire.encode(
            wire.Steps(
                job="7",
                element=0,
                agent="agent0",
                reports=[structs.StepReport(generation=1, iteration=0, total=4, at=0.0, ranks=[step])],
            )
        )
    )
    settings = structs.Settings(name="a", user="b")
    wrong = wire.Register(job="7", element=0, agent="x", node="n", address="a", slots=[0], settings=settings)
    wrong.slots = [9]
    peer.send(wire.encode(wrong))
    answers = []
    while peer.poll(500):
        answers.append(peer.recv())
    assert len(answers) == len(hostile) + 1
    assert "protocol 99 is that of a later release" in wire.decode(answers[-2], wire.Answer).error
    peer.close()
    assert len(controller.events("bad_message")) == 1, "one line per peer"
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as raw:
        host, _, port = controller.address.removeprefix("tcp://").rpartition(":")
        raw.connect((host, int(port)))
        raw.sendall(os.urandom(4096))
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as udp:
            for data in hostile:
                udp.sendto(data, (host, int(port)))
    assert controller.alive
    assert controller.job()["iteration"] == -1, "steps from somebody else's connection are not believed"


def test_a_hint_provokes_a_question_and_nothing_else(controller, running):
    hint(controller, 1)
    running[1].expect(wire.Ping, *running)
    running[1].status()
    answered = time.monotonic()
    wait(running, lambda: time.monotonic() > answered + 2.0, "the time in which others would have been asked")
    assert controller.job()["state"] == "running"
    assert controller.failures() == []


def test_the_commands_show_it(controller, running):
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
    chosen = unicronctl("events", "--json", "--node", "n1", "--since", "1h", *where).stdout.splitlines()
    assert {json.loads(line)["node"] for line in chosen} == {"n1"}
    assert json.loads(unicronctl("nodes", "--json", "--node", "n[1-2]", *where).stdout)[1]["node"] == "n2"
    wrong = unicronctl("events", "--kind", "plans", *where)
    assert wrong.returncode == 1 and wrong.stderr == "unicronctl: no event is of kind 'plans': did you mean plan?\n"
    wrong = unicronctl("explain", "nobody", *where)
    assert wrong.returncode == 1 and wrong.stderr.count("\n") == 1 and "no job is called 'nobody'" in wrong.stderr


def test_the_live_view_on_a_terminal_of_24_lines(controller, running):
    where = ["--controller", controller.address, "--interval", "0.2"]
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, 80))
    program = "from unicron_ctl.cli.unicronctl import main; main()"
    command = [sys.executable, "-c", program, "top", *where]
    process = subprocess.Popen(
        command,
        stdout=theirs,
        stderr=subprocess.STDOUT,
        env=os.environ | {"TERM": "xterm"},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell's background job ignores it
    )
    os.close(theirs)
    shown = ""
    while "WAF -" not in shown[shown.rfind("JOBID") :] or shown.count("JOBID") < 2:
        assert select.select([ours], [], [], LIMIT)[0], shown
        shown += os.read(ours, 65536).decode()
    process.send_signal(signal.SIGINT)
    assert process.wait(LIMIT) == 0
    os.close(ours)
    lines = [re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", line).strip() for line in shown.splitlines()]
    assert any(line.split()[:3] == ["7", "gpt", "running"] for line in lines), lines
    assert any(line.split()[:3] == ["n[0-2]", "3", "-"] for line in lines), lines
    assert all(len(line) <= 80 for line in lines)


def test_errors_are_one_line_that_says_what_to_do(controller, tmp_path):
    with pytest.raises(UserError, match="no controller answers at tcp://127\\.0\\.0\\.1:1: start `unicrond`"):
        ask_controller({"kind": "status"}, "tcp://127.0.0.1:1", timeout=0.3)
    second = call(*controller.command)
    assert second.returncode == 1 and "another unicrond runs on this state folder" in second.stderr
    assert second.stderr.count("\n") == 1
    (tmp_path / "bad.toml").write_text("[controller]\nheartbeat_period = 60\n")
    bad = call(*COMMAND, "--config", tmp_path / "bad.toml")
    assert bad.returncode == 2 and "enter_timeout" in bad.stderr and bad.stderr.count("\n") == 1


def test_a_reload_takes_a_good_file_and_keeps_the_old_one_for_a_bad_one(controller):
    controller.reload(PATIENT + "offer_delay = 0.5\n")
    wait_for(lambda: controller.events("configured"), "the reload")
    controller.reload(PATIENT + "offer_delay = 'soon'\n")
    wait_for(lambda: controller.events("config_refused"), "the complaint")
    assert "ERROR unicrond event=" in controller.log and "the old one stays" in controller.log
    assert controller.alive


def test_the_address_file_is_there_while_it_runs_and_with_json_each_line_is_an_object(tmp_path):
    """From its start, with metrics and a configuration that is refused, to its end."""
    config, log, written = tmp_path / "unicron.toml", tmp_path / "log", tmp_path / "state" / "address"
    config.write_text("[controller]\nslurm = 'none'\nauth = 'none'\nmetrics = ':0'\n")
    words = ["--config", config, "--state-dir", written.parent, "--listen", "tcp://127.0.0.1:0", "--log-format", "json"]
    with log.open("wb") as file:
        process = subprocess.Popen([*COMMAND, *words], cwd=ROOT, env=outside_slurm(), stdout=file, stderr=file)
    try:
        wait_for(lambda: "listening on tcp://" in log.read_text(), "it listens", now=log.read_text)
        address = written.read_text().strip()
        config.write_text("[controller]\noffer_delay = 'soon'\n")
        process.send_signal(signal.SIGHUP)
        wait_for(lambda: "offer_delay" in log.read_text(), "it complains", now=log.read_text)
        process.terminate()
        assert process.wait(LIMIT) == 0 and not written.exists()
    finally:
        process.kill()
        process.wait()
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert all({"time", "level", "program", "text"} <= line.keys() for line in lines)
    assert f"listening on {address}" in [line["text"] for line in lines]
