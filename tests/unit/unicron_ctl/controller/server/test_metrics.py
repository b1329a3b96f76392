"""Metrics: counts of records, the present state, and that Prometheus can read both; and that the alert rules, the
dashboard and the document speak of metrics that there are, by labels and values that they have."""

from __future__ import annotations

import inspect
import json
import logging
import re
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import Metric
from prometheus_client.openmetrics.exposition import generate_latest as openmetrics
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from tests.support.processes import ROOT, wait_for
from tests.support.scenarios import trained
from tests.support.world import World
from unicron_ctl.controller.model.requests import OF_ELEMENTS, ON_NODES
from unicron_ctl.controller.server import exporter as exporters
from unicron_ctl.controller.server import metrics
from unicron_ctl.controller.server.exporter import Exporter
from unicron_ctl.controller.server.metrics import Counts, gauges
from unicron_ctl.controller.server.worker import perform
from unicron_ctl.shared.log import records
from unicron_ctl.shared.log.records import Event
from unicron_ctl.shared.system.errors import UserError
from unicron_detector.failures.severity import default_table

FOLDER = ROOT / "slurm_plugin" / "monitoring"
RULES = (FOLDER / "unicron-rules.yml").read_text()
BOARD = json.loads((FOLDER / "unicron-dashboard.json").read_text())
TARGET = {"job", "instance"}  # labels that Prometheus itself gives each series
OWN = {"up": TARGET}  # its own metrics
FREE = {"job", "instance", "name", "user", "jobid", "partition"}  # whose values are the site's
FUNCTIONS = "sum max min rate increase changes histogram_quantile by and or on label_values".split()


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
    counted = Counts(registry)
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
        (3.0, records.ActionObserved(would="down n2", action="down", node="n2", element=-1)),
        (4.0, records.TakeWithheld(action="requeue", element=1)),
        (5.0, records.IsolationWithheld(node="n1", slots=[])),
        (6.0, records.SlurmFailed(action="pin")),
        (7.0, records.SlurmFailed(reason="no answer to a listing")),
    )
    told = (("drain", "asked"), ("drain", "done"), ("down", "observed"), ("requeue", "withheld"), ("pin", "refused"))
    for action, outcome in (*told, ("isolate", "withheld")):
        assert found[f"unicron_slurm_actions_total[('action', '{action}'), ('outcome', '{outcome}')]"] == 1.0
    assert sum(value for name, value in found.items() if name.startswith("unicron_slurm_actions_total")) == 6.0


def test_the_calls_of_slurm_that_begin_at_zero_are_those_that_there_are() -> None:
    assert {*ON_NODES, *OF_ELEMENTS} == set(re.findall(r'case "(\w+)"', inspect.getsource(perform)))
    found = recorded()
    assert found["unicron_slurm_actions_total[('action', 'drain'), ('outcome', 'withheld')]"] == 0.0
    assert found["unicron_events_total[('kind', 'job_set_aside')]"] == 0.0


def test_a_failure_of_each_cause_begins_at_zero_for_prometheus_sees_no_increase_to_a_first_one() -> None:
    found = recorded()
    for cause in default_table().causes:
        for severity in (1, 2, 3):
            of = f"[('cause', '{cause}'), ('severity', '{severity}')]"
            assert found[f"unicron_failures_total{of}"] == found[f"unicron_failure_verdicts_total{of}"] == 0.0
    registry = CollectorRegistry()
    Counts(registry).expect(["coffee"])
    assert samples(registry)["unicron_failures_total[('cause', 'coffee'), ('severity', '1')]"] == 0.0


def test_a_failure_of_which_more_is_known_counts_as_that_too_and_once() -> None:
    found = recorded(
        (1.0, failure("exit", 3)),
        (2.0, records.FailureVerdict(failure=1, cause="gpu_lost", severity=1)),
        (3.0, records.FailureVerdict(failure=1, slurm="NODE_FAIL")),
        (4.0, records.FailureVerdict(failure=77, cause="gpu_lost")),
    )
    assert found["unicron_failures_total[('cause', 'exit'), ('severity', '3')]"] == 1.0
    assert found["unicron_failure_verdicts_total[('cause', 'gpu_lost'), ('severity', '1')]"] == 1.0
    assert sum(value for name, value in found.items() if name.startswith("unicron_failure_verdicts_total")) == 1.0


def test_labels_and_memory_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "MOST_CAUSES", len(default_table().causes) + 2)
    monkeypatch.setattr(metrics, "MOST_JUDGED", 2)
    found = recorded(*((1.0, failure(f"cause{n}")) for n in range(5)), (2.0, failure("cause1")))
    assert found["unicron_failures_total[('cause', 'other'), ('severity', '2')]"] == 3.0
    assert found["unicron_failures_total[('cause', 'cause1'), ('severity', '2')]"] == 2.0
    counted = Counts(CollectorRegistry())
    for number in range(5):
        counted.note(Event(number, 1.0, f"job{number}", 1, failure()))
        counted.note(Event(number, 1.0, f"job{number}", 1, records.JobEnded(code=0)))
    assert not counted.failed and not counted._ranks and len(counted._judged) == 2


def test_slurm_and_the_loop_are_timed() -> None:
    registry = CollectorRegistry()
    counted = Counts(registry)
    counted.slurm_took("list", 0.2)
    counted.slurm_took("drain", 3.0)
    counted.loop_late(-0.1)
    counted.loop_late(2.0)
    found = samples(registry)
    assert found["unicron_slurm_seconds_sum[('call', 'drain')]"] == 3.0
    assert found["unicron_slurm_seconds_bucket[('call', 'list'), ('le', '0.25')]"] == 1.0
    assert found["unicron_loop_late_seconds_sum"] == 2.0 and found["unicron_loop_late_seconds_count"] == 2.0


def told(
    world: World, failed: Mapping[str, int] = {}, dropped: Mapping[str, int] = {}, log_bytes: int = 0
) -> dict[str, float]:
    return {
        f"{one.name}{sorted(one.labels.items()) if one.labels else ''}": one.value
        for family in gauges(world.core, failed, dropped, log_bytes)
        for one in family.samples
    }


def training() -> World:
    """A job on two of Slurm's three nodes."""
    return trained(2, 1, seconds=3.0)[0]


def test_what_is_now_has_jobs_nodes_and_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    world = training()
    world.core.append("1", 1, step(1, 2))
    found = told(world, dropped={"rate": 2}, failed={"1": 3}, log_bytes=4096)
    assert found["unicron_nodes[('state', 'good')]"] == 3 and found["unicron_jobs[('state', 'running')]"] == 1
    assert found["unicron_jobs[('state', 'set_aside')]"] == 0 and found["unicron_suspects_itself"] == 0
    assert found["unicron_agents"] == 2 and found["unicron_log_bytes"] == 4096
    assert found["unicron_messages_dropped_total[('why', 'rate')]"] == 2
    assert found["unicron_messages_dropped_total[('why', 'message')]"] == 0
    assert found["unicron_bound_limit[('bound', 'max_isolated_nodes')]"] == world.config.max_isolated_nodes
    assert found["unicron_bound_used[('bound', 'max_isolated_nodes')]"] == 0
    settings = world.job().settings
    job = f"[('jobid', '1'), ('name', '{settings.name}'), ('user', '{settings.user}')]"
    assert found[f"unicron_job_nodes{job}"] == 2 and found[f"unicron_job_failures_total{job}"] == 3
    measured = world.job().measured[2]
    assert measured > 0 and found["unicron_waf_flops"] == found[f"unicron_job_waf_flops{job}"] == measured
    monkeypatch.setattr(metrics, "MOST_JOBS", 0)
    assert not [name for name in told(world) if name.startswith("unicron_job_")]


def test_what_was_taken_stands_beside_its_limit() -> None:
    world = training()
    world.core.append("1", 1, records.SlurmAction(action="requeue", element=0, node="n1"))
    world.core.append("", 0, records.NodeIsolated(node="n3"))
    found = told(world)
    assert found["unicron_bound_used[('bound', 'max_requeues_per_minute')]"] == 1
    assert found["unicron_bound_used[('bound', 'max_isolated_nodes')]"] == 1
    world.run(61.0)
    assert told(world)["unicron_bound_used[('bound', 'max_requeues_per_minute')]"] == 0


@contextmanager
def answering(exporter: Exporter, world: World) -> Iterator[SimpleNamespace]:
    """A loop that answers; how often it did is in `made`."""
    loop = SimpleNamespace(ended=threading.Event(), made=0)

    def make() -> Any:
        loop.made += 1
        return gauges(world.core, {}, {}, 1)

    def run() -> None:
        while not loop.ended.wait(0.01):
            exporter.answer(make)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield loop
    finally:
        loop.ended.set()
        thread.join()


Export = Callable[..., Exporter]


@pytest.fixture
def export() -> Iterator[Export]:
    """Makes exporters that are closed after the test."""
    with ExitStack() as stack:
        yield lambda *how: stack.enter_context(closing(Exporter(*how)))


def get(exporter: Exporter) -> str:
    return urllib.request.urlopen(f"http://127.0.0.1:{exporter.port}/metrics", timeout=10).read().decode()


def test_prometheus_is_answered_by_the_loop_once_for_all_who_ask_at_once(export: Export) -> None:
    exporter = export(":0")
    assert exporter.address == "127.0.0.1", "nobody else can reach it"
    with answering(exporter, World()) as loop, ThreadPoolExecutor(8) as pool:
        texts = list(pool.map(lambda _: get(exporter), range(8)))
        assert all("unicron_log_bytes 1.0" in text and "process_open_fds" in text for text in texts)
        assert "_created" not in texts[0], "a series for each of a counter, of which no query asks"
        assert loop.made <= 2
    with pytest.raises(UserError, match="give another address"):
        Exporter(f"127.0.0.1:{exporter.port}")


def test_a_loop_that_does_not_answer_is_said_in_a_line(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str], export: Export
) -> None:
    exporter = export("127.0.0.1:0")
    monkeypatch.setattr(exporters, "SCRAPE_SECONDS", 0.1)
    monkeypatch.setattr(logging.getLogger("unicron"), "propagate", True)
    with pytest.raises(urllib.error.HTTPError) as raised:
        get(exporter)
    assert raised.value.code == 503 and b"has not answered" in raised.value.read()
    assert "has not answered" in caplog.text and "Traceback" not in capfd.readouterr().err


def test_who_sends_a_byte_now_and_then_is_cut_off_like_who_sends_none(monkeypatch, export: Export) -> None:
    monkeypatch.setattr(exporters._Server, "whole_seconds", 0.5)
    exporter = export(":0")
    with socket.create_connection(("127.0.0.1", exporter.port)) as slow:
        until = time.monotonic() + 30.0
        with pytest.raises(OSError):
            while time.monotonic() < until:
                slow.send(b"G")
                time.sleep(0.1)


def test_idle_connections_are_few_and_give_way_to_who_asks(monkeypatch, export: Export) -> None:
    monkeypatch.setattr(exporters._Server, "most_open", 2)
    exporter = export(":0")
    before = threading.active_count()
    with ExitStack() as stack:
        idle = [stack.enter_context(socket.create_connection(("127.0.0.1", exporter.port))) for _ in range(6)]
        assert [one.recv(1) for one in idle[:4]] == [b""] * 4, "the oldest are closed"
        assert wait_for(lambda: threading.active_count() <= before + 2, "two threads at most")
        with answering(exporter, World()):
            assert "unicron_log_bytes" in get(exporter), "beside two that say nothing"


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1:7453", 200),
        ("[::1]:7453", 200),
        ("localhost", 200),
        ("HEAD.example.org:7453", 200),
        ("evil.example:7453", 421),
        ("head.example.org.evil.example", 421),
        ("", 421),
    ],
)
def test_who_calls_this_host_by_another_name_is_told_nothing(host: str, status: int, export: Export) -> None:
    """A page of another site can lead its own name here, and read through a browser what it finds (DNS rebinding)."""
    exporter = export(":0", ["head.example.org"])
    with answering(exporter, World()), socket.create_connection(("127.0.0.1", exporter.port), 10) as client:
        client.sendall(f"GET /metrics HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode())
        answer = client.makefile("rb").read()
    assert answer.startswith(f"HTTP/1.0 {status}".encode()) and (b"unicron_log_bytes" in answer) is (status == 200)


# ---------------------------------------------------------------- alert rules, dashboard, document
def families() -> list[Metric]:
    """All that a controller with a job, a failure and a pause exports."""
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    counted = Counts(registry)
    counted.slurm_took("list", 0.1)
    world = training()
    for record in (step(1, 2), failure(), records.ActionsPaused(partition="main"), planned()):
        world.core.append("1", 1, record)
    counted.note(Event(1, 1.0, "1", 1, failure()))
    counted.note(Event(2, 1.0, "1", 1, records.FailureVerdict(failure=1, cause="gpu_lost")))
    return [*registry.collect(), *gauges(world.core, {}, {}, 0)]


def planned() -> records.ClusterReplanned:
    return records.ClusterReplanned(
        assignment={}, reasons={}, objective=1.0, waf=1.0, inputs="", trigger="", spares=0, looked_up=False
    )


@pytest.fixture(scope="module")
def known() -> dict[str, dict[str, set[str]]]:
    """The values of each label of each series."""
    found: dict[str, dict[str, set[str]]] = {}
    for family in families():
        for one in family.samples:
            labels = found.setdefault(one.name, {})
            for name, value in one.labels.items():
                labels.setdefault(name, set()).add(value)
    return found


def expressions() -> Iterator[tuple[str, str]]:
    """(what it is of, the expression)."""
    alerts = re.findall(r"- alert: (\w+)\n +expr: (.+)\n", RULES)
    assert len(alerts) == RULES.count("alert:") and alerts, "each on a line of its own"
    yield from alerts
    for panel in BOARD["panels"]:
        for target in panel.get("targets", []):
            yield panel["title"], target["expr"]
    for variable in BOARD["templating"]["list"]:
        if variable["type"] == "query":
            yield variable["name"], variable["query"]["query"]
    yield from ((note["name"], note["expr"]) for note in BOARD["annotations"]["list"])


@pytest.mark.parametrize(("of", "expression"), list(expressions()), ids=lambda text: text[:40])
def test_every_expression_is_of_metrics_that_there_are(of: str, expression: str, known: dict[str, Any]) -> None:
    bare = re.sub(r"\{[^}]*\}|\[[^]]*\]|\bby \([^)]*\)|\d[\d.e]*", " ", expression)
    names = set(re.findall(r"[a-z_]+", bare)) - set(FUNCTIONS) - TARGET
    assert names and names <= known.keys() | OWN.keys(), names - known.keys()
    labels = TARGET.union(*(known.get(name, {}) for name in names), *(OWN.get(name, set()) for name in names))
    for group in re.findall(r"\bby \(([^)]*)\)", expression):
        assert set(group.split(", ")) <= labels, group
    for name, matchers in re.findall(r"(\w+)\{([^}]*)\}", expression):
        for label, value in re.findall(r'(\w+)=~?"([^"]*)"', matchers):
            assert label in labels, f"{of}: {name} has no label {label}"
            if label not in FREE:
                assert set(value.split("|")) <= known[name][label], f"{of}: {name} never has {label}={value}"


def test_legends_and_texts_name_labels_that_are_left(known: dict[str, Any]) -> None:
    for panel in BOARD["panels"]:
        for target in panel.get("targets", []):
            groups = re.findall(r"\bby \(([^)]*)\)", target["expr"])
            names = re.findall(r"\b(?:unicron|process)_\w+", target["expr"])
            left = set(groups[0].split(", ")) if groups else set().union(*(known[name] for name in names))
            assert set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])) <= left, panel["title"]


def test_panels_have_numbers_of_their_own_and_do_not_overlap() -> None:
    panels = BOARD["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        at = panel["gridPos"]
        cells = {(at["x"] + x, at["y"] + y) for x in range(at["w"]) for y in range(at["h"])}
        assert not cells & taken and at["x"] + at["w"] <= 24, panel["title"]
        taken |= cells
        for target in panel.get("targets", []):
            assert target["datasource"]["uid"] == "${datasource}", "the reader's choice"


def test_the_document_names_every_metric_and_every_alert(known: dict[str, Any]) -> None:
    text = (ROOT / "docs" / "metrics.md").read_text()
    of_ours = {name for name in known if name.startswith("unicron_") and not name.endswith(("_created", "_sum"))}
    shown = {name.removesuffix("_bucket") for name in of_ours if not name.endswith("_count")}
    assert set(re.findall(r"\bunicron_[a-z_]+", text)) == shown
    assert set(re.findall(r"`(Unicron\w+)`", text)) == set(re.findall(r"alert: (\w+)", RULES))
    code = inspect.getsource(metrics)
    assert not [name for name in shown if not re.search(rf"\b{name}\b", code)], "a search finds the line"
