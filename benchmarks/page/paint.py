"""``python -m benchmarks.page.paint NODES RANKS``: visits the page with Chromium and an empty cache, and prints as JSON
when something was painted first, and when the map was drawn; and the CPU time that the controller's answers take.

The controller's core is in this process, and no agent disturbs it. Its answers are encoded, decoded and cleaned as they
are on their way to a real page; the connection to a real unicrond is left out.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

from tests.support.browser import Browser
from tests.support.web_page import ROOT, Site, busy_world
from unicron_ctl.controller.api import answers
from unicron_ctl.shared.protocol import wire
from unicron_ctl.shared.system.printable import clean
from unicron_ctl.web.page_source import STATUS

VISITS, ANSWERS, JOBS = 7, 15, 16
FIGURES = """({
  first: performance.getEntriesByName("first-contentful-paint")[0].startTime / 1000,
  shown: performance.getEntriesByName("shown")[0].startTime / 1000,
  nodes: document.querySelectorAll("#map i").length,
})"""


class Encoded(Site):
    """A page whose answers have been on the wire."""

    def ask(self, question: Mapping[str, Any]) -> Any:
        data = wire.encode(wire.Answer(ok=True, data=super().ask(question)))
        return clean(wire.decode(data, wire.Answer).data)


def visit(browser: Browser, site: Site) -> dict[str, float]:
    """One visit to a page at which nobody has looked yet."""
    browser.open("about:blank")
    site.begin_anew()
    browser.open(f"http://{site.host}/")
    for name in ("shown", "first-contentful-paint"):
        browser.wait(f'performance.getEntriesByName("{name}").length')
    found: dict[str, float] = browser.js(FIGURES)
    return found


def answered(site: Site, question: Mapping[str, Any]) -> float:
    """The CPU time of the controller's answer, encoding included, in seconds: the median of several."""
    arguments = {name: value for name, value in question.items() if name != "kind"}
    found = []
    for _ in range(ANSWERS):
        began = time.thread_time()
        told = answers.answer(site.world.core, site.store, question["kind"], arguments, ROOT)
        wire.encode(wire.Answer(ok=True, data=told))
        found.append(time.thread_time() - began)
    return median(found)


def main() -> None:
    world = busy_world(int(sys.argv[1]), JOBS, int(sys.argv[2]))
    with tempfile.TemporaryDirectory(prefix="unicron-paint-") as folder:
        site = Encoded(world, Path(folder), viewers=False)
        try:
            browser = Browser()
            try:
                browser.call("Network.setCacheDisabled", cacheDisabled=True)
                visits = [visit(browser, site) for _ in range(VISITS)]
            finally:
                browser.close()
            job = next(iter(world.core.state.jobs))
            questions = STATUS, {"kind": "explain", "job": job}, {"kind": "scenario"}
            cpu = {question["kind"]: answered(site, question) for question in questions}
            print(json.dumps({"visits": visits, "cpu": cpu}))
        finally:
            site.close()


if __name__ == "__main__":
    main()
