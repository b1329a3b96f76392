"""The scale benchmark's connections with a real ROUTER, its simulated agents."""

from __future__ import annotations

import time

import pytest
import zmq

from benchmarks.cases import scale
from benchmarks.cases.log_growth import DAY, failures
from benchmarks.report import Report
from benchmarks.scale.agents import Agent, Layout
from benchmarks.scale.alone import Alone
from benchmarks.scale.lines import Connection, Failed
from benchmarks.scale.simulation import Simulation
from unicron_ctl.shared.protocol import shared_plans, wire
from unicron_ctl.shared.system.errors import UserError

LIMIT = 5.0


@pytest.fixture
def router():
    context = zmq.Context()
    socket = context.socket(zmq.ROUTER)
    socket.setsockopt(zmq.RCVTIMEO, int(LIMIT * 1000))
    yield socket
    context.destroy(linger=0)


def connect(router: zmq.Socket) -> Connection:
    return Connection("127.0.0.1", router.bind_to_random_port("tcp://127.0.0.1"), b"agent-1", "127.1.1.1", LIMIT)


def receive(connection: Connection) -> list[bytes]:
    """What comes next; a message that is not whole yet is waited for."""
    deadline = time.monotonic() + LIMIT
    while time.monotonic() < deadline:
        if found := connection.receive():
            return found
    raise AssertionError(f"nothing within {LIMIT:g} s")


@pytest.mark.parametrize("size", [0, 1, 255, 256, 70_000, 1_000_000])
def test_a_connection_is_a_dealer(router, size):
    connection = connect(router)
    connection.send(b"x" * size)  # held back until the handshake is over
    while not connection.accepted:
        assert connection.receive() == []
    while not connection.flush():
        pass
    assert router.recv_multipart() == [b"agent-1", b"x" * size]
    before = time.time()
    router.send_multipart([b"agent-1", b"y" * size])
    assert receive(connection) == [b"y" * size]
    assert before - 0.1 <= connection.arrived <= time.time()
    connection.close()


def test_a_connection_that_the_controller_closes_is_lost(router):
    connection = connect(router)
    router.close(linger=0)
    deadline = time.monotonic() + LIMIT
    with pytest.raises(Failed):
        while time.monotonic() < deadline:
            connection.receive()
    connection.close()


def plan(generation: int, members: list[int], **fields) -> tuple[wire.Plan, Layout]:
    made = wire.Plan(generation=generation, members=members, store="a:1", prefix="p", **fields)
    return made, Layout.of(shared_plans.share(made, shared_plans.common(made), members))


def trained(agent: Agent, members: list[int]) -> Layout:
    """The agent's ranks run in generation 1."""
    agent.ready(1.0)
    _, layout = plan(1, members)
    agent.obey(layout, 2.0)
    agent.enter(layout, 0, 3.0)
    return layout


def test_every_micro_batch_is_computed_once_before_and_after_a_loss():
    agents = [Agent(element, 2, 6) for element in range(3)]
    for agent in agents:
        trained(agent, list(range(6)))
    assert sorted(index for a in agents for share in a.shares.values() for index in share) == list(range(6))
    agents[1].die(3, 4.0)
    for agent in agents:
        agent.stop(1, 5.0)
    stopped = {slot: rank for a in agents for slot, rank in a.ranks.items() if rank.state == "stopped"}
    assert sorted(stopped) == [0, 1, 2, 4, 5]
    done = [index for rank in stopped.values() for index in rank.done]
    assert done and len(done) == len(set(done))
    assert all(rank.broken == 1 for rank in stopped.values())


def test_a_restarted_rank_joins_by_an_offer():
    agent = Agent(0, 2, 2)
    trained(agent, [0, 1])
    agent.die(1, 4.0)
    agent.stop(1, 5.0)
    _, alone = plan(2, [0], iteration=7)
    agent.obey(alone, 6.0)
    agent.enter(alone, 7, 6.5)
    assert agent.shares == {0: [0, 1]}
    assert agent.start(1, 1, 7.0) and not agent.start(1, 1, 7.0)
    agent.ready(8.0)
    _, both = plan(3, [0, 1], boundary=True, joiners=[1])
    agent.obey(both, 9.0)
    assert [rank.state for rank in agent.ranks.values()] == ["running", "entering"]
    agent.enter(both, 8, 10.0)
    assert [(r.state, r.generation, r.iteration, r.done) for r in agent.ranks.values()] == [("running", 3, 8, [])] * 2
    status = wire.decode(agent.say(11.0))
    assert status.number == 1 and status.ranks[1].incarnation == 1
    assert agent.steps(3, 8, 1.0, 12.0)
    (report,) = wire.decode(agent.say_steps()).tables
    assert report.micro_batches == [[0], [1]] and report.total == 2


def test_a_month_of_failures_is_in_order_and_repeatable():
    drawn = list(failures(2048, 8, 30.0))
    assert drawn == list(failures(2048, 8, 30.0))
    assert [f.at for f in drawn] == sorted(f.at for f in drawn) and drawn[-1].at < 30 * DAY
    assert all(f.slot // 8 == f.element for f in drawn)
    assert len(drawn) == pytest.approx(2048 * 30 * 24 / 1000, rel=0.1)


def test_the_core_alone_is_measured_by_its_own_time_and_agents_that_are_too_many_end_it_with_a_line(monkeypatch):
    sizes = scale.Sizes(12, 2, 1.0, 1, sockets=False)
    report = Report("scale", sizes)
    scale.measure(sizes, report)
    figures = {figure.what: figure.value for figure in report.figures}
    assert 0 < figures["share of the core while all train"] < 1 and figures["leases lost"] == 0
    assert figures["a rank dies: Break at all agents"] > 0 and "memory, at most" not in figures
    monkeypatch.setattr(scale, "FORM_SECONDS", 0.1)
    with pytest.raises(UserError, match=r"12 agents were too many: .*all ranks train for the first time"):
        scale.measure(sizes, report)


def test_a_question_that_the_controller_refuses_ends_the_run_with_a_line(tmp_path):
    """Defect: it ended in a traceback, as on a busy machine, where too many questions waited."""
    simulation = Simulation(Alone(tmp_path), 2, 2)
    simulation._asked.append(0.0)
    with pytest.raises(Failed, match="a question was refused: ask less"):
        simulation._on_answers([wire.encode(wire.Answer(ok=False, error="ask less"))], 1.0)
    simulation.close()
