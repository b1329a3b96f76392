"""Writes the weekly report as text, and as a page in one file."""

from __future__ import annotations

import html
from collections.abc import Iterator
from datetime import datetime

from unicron_ctl.shared.protocol.answer_schema import Report
from unicron_ctl.shared.system.columns import Listing, plain
from unicron_detector.words import plural

JOBS = 20  # listed; the others are counted


def _day(at: float) -> str:
    return f"{datetime.fromtimestamp(at):%Y-%m-%d %H:%M}"


def title(report: Report) -> str:
    """Return the report's title."""
    return f"Unicron, {_day(report.since)} to {_day(report.until)}"


def summary(report: Report) -> list[str]:
    """Return the report in a few lines."""
    failures = sum(cause.failures for cause in report.causes)
    lines = [
        f"failures: {failures}; recoveries: {report.healed}",
        f"lost: {report.lost_node_hours:.1f} node-hours",
        f"saved: {report.saved_node_hours:.1f} node-hours, against a requeue and a start from the last checkpoint, "
        f"{report.spared_seconds:.0f} s of all nodes for each recovery (checkpoint_seconds, replacement_seconds)",
    ]
    if report.needed_admin:
        lines.append(f"needed an admin: {plural(report.needed_admin, 'time')}; `unicronctl status` says what does now")
    if report.cut_at is not None:
        lines.append(f"only since {_day(report.cut_at)}: there were too many events before")
    return lines + [f"observed: {line}" for line in report.observed]


def tables(report: Report) -> Iterator[tuple[str, Listing]]:
    """Yield (title, table) of failures by cause, of jobs and of nodes. Empty tables are left out."""
    causes = Listing("failures", "severity", "jobs", "nodes", "cause")
    for cause in report.causes:
        causes.add_row(str(cause.failures), str(cause.severity), str(cause.jobs), str(cause.nodes), cause.cause)
    jobs = Listing("jobid", "failures", "healed", "lost_h", "saved_h", "end")
    for job in report.jobs[:JOBS]:
        end = f"code {job.ended_with}" if job.ended_with else "-"
        hours = f"{job.lost_node_hours:.1f}", f"{job.saved_node_hours:.1f}"
        jobs.add_row(job.job, str(job.failures), str(job.healed), *hours, end)
    if len(report.jobs) > JOBS:
        jobs.add_note(f"and {len(report.jobs) - JOBS} more jobs")
    nodes = Listing("node", "failures", "lost", "out_of_service")
    for node in report.nodes[:JOBS]:
        nodes.add_row(node.node, str(node.failures), str(node.lost), str(node.out_of_service))
    if len(report.nodes) > JOBS:
        nodes.add_note(f"and {len(report.nodes) - JOBS} more nodes")
    titled = {"Failures by cause": causes, "Jobs": jobs, "Nodes": nodes}
    yield from ((name, table) for name, table in titled.items() if table.rows)


def text(report: Report) -> str:
    """Return the whole report for a terminal or a mail."""
    parts = [title(report), *summary(report)]
    for name, table in tables(report):
        parts += ["", name, *table.lines()]
    return "\n".join(parts) + "\n"


_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 52rem; margin: 2rem auto; padding: 0 1rem; color: #1a1a1a }
h1 { font-size: 1.3rem } h2 { font-size: 1rem; margin-top: 2rem }
table { border-collapse: collapse; width: 100% } th, td { text-align: left; padding: .2rem .8rem .2rem 0 }
th { border-bottom: 1px solid #999; font-weight: 600 } td { border-bottom: 1px solid #eee }
.bar { background: #c0392b; height: .6rem; border-radius: 2px }
@media (prefers-color-scheme: dark) { body { background: #151515; color: #ddd } td { border-color: #333 } }
"""


def page(report: Report) -> str:
    """Return the report as HTML, without scripts and external files."""
    head = html.escape(title(report))
    lines = "".join(f"<li>{html.escape(line)}</li>" for line in summary(report))
    body = "".join(_table(name, table, index == 0) for index, (name, table) in enumerate(tables(report)))
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{head}</title>'
        f'<meta name="viewport" content="width=device-width"><style>{_STYLE}</style></head>'
        f"<body><h1>{head}</h1><ul>{lines}</ul>{body}</body></html>\n"
    )


def _table(name: str, table: Listing, bars: bool) -> str:
    """Return a listing as HTML. bars: whether its first column is shown as a bar, too."""
    heads = "".join(f"<th>{html.escape(heading)}</th>" for heading in table.headings) + "<th></th>" * bars
    most = max((int(plain(row[0])) for row in table.rows), default=1) if bars else 1
    rows = ""
    for row in table.rows:
        cells = "".join(f"<td>{html.escape(str(cell))}</td>" for cell in row)
        if bars:
            share = 100 * int(plain(row[0])) // max(1, most)
            cells += f'<td style="width:40%"><div class="bar" style="width:{share}%"></div></td>'
        rows += f"<tr>{cells}</tr>"
    notes = "".join(f"<p>{html.escape(plain(note))}</p>" for note in table.notes)
    return f"<h2>{html.escape(name)}</h2><table><tr>{heads}</tr>{rows}</table>{notes}"
