"""Metrics: what is counted from records, what is told of the present, and that Prometheus can read it."""

from __future__ import annotations

import threading
import urllib.error
import urllib.request
from collections import Counter

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.openmetrics.exposition import generate_latest as openmetrics
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from tests.support.world import FakeAgent, FakeSlurm, World
from unicron.ctl.controller.log import records
from unicron.ctl.controller.log.records import Event
from unicron.ctl.controller.server import metrics
from unicron.ctl.controller.server.metrics import Exporter, Recorded, present
from unicron.ctl.system.errors import UserError


def samples(registry: CollectorRegistry) -> dict[str, float]:
    """Each sample by its name and labels, as Prometheus' own parser reads it."""
    families = text_string_to_metric_families(openmetrics(registry).decode())
    return {
        f"{one.name}{sorted(one.labels.items()) if one.labels else ''}": one.value
        for family in families
        for one in family.samples
    }


def failure(cause: str = "oom", severity: int = 2, **more: object) -> records.FailureDetected:
    usual = {"kind_of_failure": "rank", "slots": [1], "action": "restart", "detected_by": "exit", "source": "agent"}
    return records.FailureDetected(**usual | {"cause": cause, "severity": severity} | more)  # type: ignore[arg-type]


def step(iteration: int, ranks: int) -> records.Step:
    usual = {"loss": 1.0, "seconds": 1.0, "nodes": ranks, "flops": 1.0, "train_iterations": 9, "micro_batches": 8}
    return records.Step(iteration=iteration, ranks=ranks, computed=8, **usual)  # type: ignore[arg-type]


def recorded(*told: tuple[float, records.Record]) -> dict[str, float]:
    registry = CollectorRegistry()
    counted = Recorded(registry)
    for number, (at, record) in enumerate(told):
        counted.note(Event(number + 1, at, "7", 1, record))
    return samples(registry)


def test_a_failure_is_counted_by_its_cause_and_timed_until_all_train_again() -> None:
    found = recorded(
        (10.0, step(1, 4)),
        (20.0, failure(fault_at=19.5)),
        (20.2, failure(severity=3)),
        (20.6, step(2, 3)),
        (24.0, step(3, 4)),
        (25.0, step(4, 4)),
    )
    assert found["unicron_failures_total[('cause', 'oom'), ('severity', '2')]"] == 1.0
    assert found["unicron_failures_total[('cause', 'oom'), ('severity', '3')]"] == 1.0
    assert found["unicron_detection_seconds_count"] == 1.0 and found["unicron_detection_seconds_sum"] == 0.5
    assert found["unicron_next_step_seconds_count"] == 1.0
    assert found["unicron_next_step_seconds_sum"] == pytest.approx(0.6)
    assert found["unicron_full_strength_seconds_sum"] == 4.0 and found["unicron_full_strength_seconds_count"] == 1.0
    assert found["unicron_events_total[('kind', 'step')]"] == 4.0


def test_a_failure_before_the_first_step_and_of_a_job_that_ends_is_never_timed() -> None:
    ended = records.JobEnded(code=0)
    told = [(10.0, failure()), (11.0, step(1, 2)), (12.0, failure()), (13.0, ended), (14.0, step(2, 2))]
    found = recorded(*told)
    assert found["unicron_next_step_seconds_count"] == found["unicron_full_strength_seconds_count"] == 0.0


def test_what_is_asked_of_slurm_is_counted_by_what_became_of_it() -> None:
    found = recorded(
        (1.0, records.SlurmAction(action="drain", element=-1, node="n1")),
        (2.0, records.SlurmDone(action="drain", node="n1")),
        (3.0, records.Observed(would="down n2", action="down", node="n2", element=-1)),
    )
    for action, outcome in (("drain", "asked"), ("drain", "done"), ("down", "withheld")):
        assert found[f"unicron_slurm_actions_total[('action', '{action}'), ('outcome', '{outcome}')]"] == 1.0


def test_what_is_now_has_jobs_and_nodes_and_no_more_labels_than_living_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    slurm = FakeSlurm(3)
    world = World(slurm)
    slurm.submit("1", 2)
    for element in (0, 1):
        agent = FakeAgent(world, "1", element, f"n{element + 1}", nodes=2)
        agent.register()
        agent.ready()
    world.run(3.0)

    def told() -> dict[str, float]:
        families = present(world.core, Counter({"rate": 2}), 0.01, 4096)
        return {
            f"{one.name}{sorted(one.labels.items()) if one.labels else ''}": one.value
            for family in families
            for one in family.samples
        }

    found = told()
    assert found["unicron_nodes[('state', 'good')]"] == 3 and found["unicron_jobs[('state', 'running')]"] == 1
    assert found["unicron_agents"] == 2 and found["unicron_log_bytes"] == 4096
    assert found["unicron_messages_dropped_total[('why', 'rate')]"] == 2
    name = world.job().settings.name
    user = world.job().settings.user
    assert found[f"unicron_job_nodes[('job', '1'), ('name', '{name}'), ('user', '{user}')]"] == 2
    monkeypatch.setattr(metrics, "MOST_JOBS", 0)
    assert not [name for name in told() if name.startswith("unicron_job_")]


def test_prometheus_is_answered_by_the_loop_and_told_when_it_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    exporter = Exporter("127.0.0.1:0")
    world = World()
    ended = threading.Event()

    def loop() -> None:
        while not ended.wait(0.01):
            exporter.answer(lambda: present(world.core, Counter(), 0.0, 1))

    thread = threading.Thread(target=loop)
    thread.start()
    place = f"http://127.0.0.1:{exporter.port}/metrics"
    try:
        text = urllib.request.urlopen(place, timeout=10).read().decode()
        assert "unicron_log_bytes 1.0" in text and "process_open_fds" in text
        ended.set()
        thread.join()
        monkeypatch.setattr(metrics, "SCRAPE_SECONDS", 0.1)
        with pytest.raises((urllib.error.HTTPError, ConnectionError)):
            urllib.request.urlopen(place, timeout=10).read()
        with pytest.raises(UserError, match="give another address"):
            Exporter(f"127.0.0.1:{exporter.port}")
    finally:
        ended.set()
        exporter.close()
