"""The page of `unicronctl web`: the cost of its questions for the controller's core, and the time of Chromium.

The controller's core is in this process, without agents. Its answers are encoded, decoded and cleaned as for a real
page; there is no connection to a unicrond.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.report import Report, median_seconds
from tests.support.browser import Browser
from tests.support.web_page import ROOT, Site, busy_world
from unicron_ctl.controller.api import answers
from unicron_ctl.shared.protocol import wire
from unicron_ctl.shared.system.printable import clean
from unicron_ctl.web.page_source import EXPLAIN_SECONDS, SCENARIO_SECONDS, STATUS, STATUS_SECONDS


class Sizes(msgspec.Struct, frozen=True):
    """Sizes of a run."""

    nodes: int = 2048
    ranks: int = 8
    """Ranks of a node."""
    jobs: int = 16
    visits: int = 7
    answers: int = 15
    """Answers to each question; the median counts."""


SMALLEST = Sizes(32, 2, 2, 1, 2)
TIMES = """({
  first: performance.getEntriesByName("first-contentful-paint")[0].startTime / 1000,
  shown: performance.getEntriesByName("shown")[0].startTime / 1000,
})"""


class EncodedSite(Site):
    """A page whose answers are encoded and decoded."""

    def ask(self, question: Mapping[str, Any]) -> Any:
        data = wire.encode(wire.Answer(ok=True, data=super().ask(question)))
        return clean(wire.decode(data, wire.Answer).data)


def measure(sizes: Sizes, report: Report) -> None:
    """Visit the page, then ask its questions."""
    world = busy_world(sizes.nodes, sizes.jobs, sizes.ranks)
    with tempfile.TemporaryDirectory(prefix="unicron-page-") as folder:
        site = EncodedSite(world, Path(folder), viewers=False)
        try:
            browser = Browser()
            try:
                browser.call("Network.setCacheDisabled", cacheDisabled=True)
                visits = [visit(browser, site) for _ in range(sizes.visits)]
            finally:
                browser.close()
            job = next(iter(world.core.state.jobs))
            questions = STATUS, {"kind": "explain", "job": job}, {"kind": "scenario"}
            status, explain, scenario = (answer_seconds(site, question, sizes.answers) for question in questions)
        finally:
            site.close()
    for name, seconds in (("status", status), ("explain", explain), ("scenario", scenario)):
        report.figure(f"CPU time of the answer to {name}", 1e3 * seconds, "ms")
    share = status / STATUS_SECONDS
    with_job = share + explain / max(EXPLAIN_SECONDS, STATUS_SECONDS) + scenario / SCENARIO_SECONDS
    report.figure("controller's core for all who watch", 100 * share, "%", most=2.0)
    report.figure("the same, one of them with a job open", 100 * with_job, "%", most=2.0)
    report.figure("first paint", statistics.median(each["first"] for each in visits), "s", most=0.5)
    report.figure("the whole map is drawn", statistics.median(each["shown"] for each in visits), "s", most=0.5)


def visit(browser: Browser, site: Site) -> dict[str, float]:
    """Visit a page without sessions. Return when something was painted, and when the map was drawn."""
    browser.open("about:blank")
    site.begin_anew()
    browser.open(f"http://{site.host}/")
    for name in ("shown", "first-contentful-paint"):
        browser.wait(f'performance.getEntriesByName("{name}").length')
    found: dict[str, float] = browser.js(TIMES)
    return found


def answer_seconds(site: Site, question: Mapping[str, Any], count: int) -> float:
    """Return the CPU time of the controller's answer, encoding included."""
    arguments = {name: value for name, value in question.items() if name != "kind"}

    def answer() -> None:
        data = answers.answer(site.world.core, site.store, question["kind"], arguments, ROOT)
        wire.encode(wire.Answer(ok=True, data=data))

    return median_seconds(answer, count, time.thread_time)
