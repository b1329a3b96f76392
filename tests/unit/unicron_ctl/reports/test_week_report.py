"""The weekly report as text and as a page."""

from __future__ import annotations

import re
from html.parser import HTMLParser

import msgspec
from syrupy.assertion import SnapshotAssertion

from tests.support.week_log import log
from unicron_ctl.reports import week_report
from unicron_ctl.shared.log.week import week
from unicron_ctl.shared.protocol.answer_schema import Report


def shown() -> Report:
    found = week(log(), 6.0, 70.0, spared=960.0)
    return msgspec.structs.replace(found, observed=["acting would have given 3.0 more node-hours <b>"], cut_at=7.0)


def test_the_text_says_what_it_counts_and_against_what(snapshot: SnapshotAssertion) -> None:
    text = week_report.text(shown())
    assert re.sub(r"[\d-]+ \d\d:\d\d", "TIME", text) == snapshot, "in any time zone"


class Page(HTMLParser):
    """Notes open tags and what a page would load."""

    def __init__(self) -> None:
        super().__init__()
        self.open, self.loads = list[str](), list[str]()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.loads += [f"{tag} {name}" for name, _ in attrs if name in ("src", "href", "srcset", "action")]
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_loads_nothing_and_escapes_what_it_shows() -> None:
    text = week_report.page(shown())
    page = Page()
    page.feed(text)
    assert not page.open and not page.loads and "<script" not in text
    assert "&lt;b&gt;" in text and "gpu_lost" in text and "url(" not in text


def test_a_quiet_week_has_no_tables() -> None:
    text = week_report.text(week([], 0.0, 604800.0, 960.0))
    assert "failures: 0; recoveries: 0" in text and "NODE" not in text
