"""The alert rules, the dashboard and the document speak of metrics that there are, by labels and values that they
have."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import Metric

from tests.support.processes import ROOT
from tests.unit.unicron_ctl.controller.server.test_metrics import failure, step, training
from unicron_ctl.controller.server.metric_counts import Recorded
from unicron_ctl.controller.server.metric_gauges import Kept, present
from unicron_ctl.shared.log import records
from unicron_ctl.shared.log.records import Event

FOLDER = ROOT / "slurm_plugin" / "monitoring"
RULES = (FOLDER / "unicron-rules.yml").read_text()
BOARD = json.loads((FOLDER / "unicron-dashboard.json").read_text())
TARGET = {"job", "instance"}  # labels that Prometheus itself gives each series
OWN = {"up": TARGET}  # its own metrics
FREE = {"job", "instance", "name", "user", "jobid", "partition"}  # whose values are the site's
FUNCTIONS = "sum max min rate increase changes histogram_quantile by and or on label_values".split()


def families() -> list[Metric]:
    """All that a controller with a job, a failure and a pause exports."""
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    counted = Recorded(registry)
    counted.slurm_took("list", 0.1)
    world = training()
    for record in (step(1, 2), failure(), records.Paused(partition="main"), planned()):
        world.core.append("1", 1, record)
    counted.note(Event(1, 1.0, "1", 1, failure()))
    counted.note(Event(2, 1.0, "1", 1, records.FailureVerdict(failure=1, cause="gpu_lost")))
    return [*registry.collect(), *present(world.core, Kept())]


def planned() -> records.Replanned:
    return records.Replanned(
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
