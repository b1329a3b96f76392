"""What fails on every node at its start is the script's own failure, whatever its words: no node pays for it."""

from __future__ import annotations

import pytest

from tests.support.world import FakeAgent, World
from unicron_ctl.controller.nodes import readmission
from unicron_ctl.shared.protocol import wire
from unicron_detector.failures.escalation_table import ISOLATE, RESTART
from unicron_detector.failures.severity import Severity

TEXTS = (
    "ConnectionRefusedError: [Errno 111] Connection refused",
    "requests.exceptions.ConnectionError: HTTPSConnectionPool(host='hub', port=443): Max retries exceeded",
    "ConnectionResetError: [Errno 104] Connection reset by peer (through multiprocessing/connection.py)",
    "torch.distributed.DistBackendError: NCCL error: unhandled system error",
    "RuntimeError: Unexpected error from cudaGetDeviceCount(). Error 802: system not yet initialized",
    "RuntimeError: CUDA error: uncorrectable ECC error encountered",
    "OSError: [Errno 37] No locks available",
    "Fatal Python error: Segmentation fault",
    "ValueError: bad config",
)


def fail_at_the_start(world: World, agents: list[FakeAgent], text: str, times: int = 5, lived: float = 20.0) -> None:
    for _ in range(times):
        for agent in agents:
            for slot in agent.slots:
                if agent.ranks[slot].state == "starting":
                    agent.die(slot, 1, lived=lived, last_line=text)
        world.run(9)


@pytest.mark.parametrize("nodes", [2, 4])
@pytest.mark.parametrize("text", TEXTS)
def test_a_failure_at_the_start_on_every_node_ends_the_job_and_blames_no_node(text: str, nodes: int) -> None:
    world = World()
    agents = [FakeAgent(world, "1", e, f"n{e}", nodes=nodes) for e in range(nodes)]
    for agent in agents:
        agent.register()
    fail_at_the_start(world, agents, text, lived=20.0 if nodes == 2 else 700.0)  # a model may load for minutes
    job = world.job()
    assert job.phase == "ended" and job.ended.code == 1
    assert max(len([f for f in job.failures if f.slot == slot]) for slot in range(nodes)) <= 3
    assert not job.avoid and not any(readmission.suspect(world.core.view, agent.node) for agent in agents)
    assert next(m for _, m in world.sent if isinstance(m, wire.End)).code == 1


def test_one_node_of_several_that_says_so_is_isolated_when_it_says_so_again() -> None:
    world = World()
    agents = [FakeAgent(world, "1", e, f"n{e}", nodes=3) for e in range(3)]
    for agent in agents:
        agent.register()
    fail_at_the_start(world, agents[:1], "RuntimeError: CUDA error: uncorrectable ECC error encountered", times=2)
    job = world.job()
    assert job.phase != "ended"
    assert [(Severity(f.record.severity), f.record.action) for f in job.failures] == [
        (Severity.SEV2, RESTART),
        (Severity.SEV1, ISOLATE),
    ]


@pytest.mark.parametrize("text", TEXTS[3:6])
def test_a_job_that_has_trained_is_not_ended_for_what_the_network_or_the_hardware_does(text: str) -> None:
    world = World()
    agents = world.start_job(nodes=3)
    for iteration in range(5):
        world.iterate("1", iteration)
    for agent in agents:
        agent.die(agent.slots[0], 1, lived=500.0, last_line="RuntimeError: Connection reset by peer")
    fail_at_the_start(world, agents, text)
    assert world.job().phase != "ended"
