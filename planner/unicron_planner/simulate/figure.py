"""Pictures of simulation results: WAF over time per policy with failures marked, and what was lost to what.

`draw` writes PNG or SVG with matplotlib (the optional extra `figures`); `page` returns a self-contained HTML page and
needs nothing but the standard library.
"""

from __future__ import annotations

import html
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from unicron_planner.problem.objective import PlanError
from unicron_planner.simulate.engine import Result
from unicron_planner.simulate.history import History

# One colour per part, in the same order everywhere; safe for colour-blind readers, and labelled.
PARTS = (
    ("efficiency", "useful work", "#2a78d6"),
    ("detection", "detection", "#eda100"),
    ("transition", "transition", "#e34948"),
    ("recompute", "recompute", "#4a3aa7"),
    ("sub_healthy", "sub-healthy", "#b7b5ae"),
)
INK, MUTED, GRID = "#0b0b0b", "#52514e", "#e1e0d9"
DAY = 86400.0


def _time_unit(seconds: float) -> tuple[float, str]:
    return (DAY, "days") if seconds > 3 * DAY else (3600.0, "hours") if seconds > 7200 else (60.0, "minutes")


def _steps(result: Result, until: float) -> tuple[list[float], list[float]]:
    """(times, WAF as a share of the ideal), ready for a step plot up to the end."""
    times = [when for when, _ in result.series] or [0.0]
    values = [waf / result.ideal_waf for _, waf in result.series] or [0.0]
    return [*times, until], [*values, values[-1]]


def _shares(result: Result) -> list[float]:
    return [result.efficiency, *(result.lost[name] for name, _, _ in PARTS[1:])]


def draw(results: Sequence[Result], until: float, path: str | Path, title: str = "") -> None:
    """Writes the figure; the format follows the file's ending, .png or .svg. Raises PlanError."""
    unit, name = _time_unit(until)
    count = len(results)
    figure = empty(path, (13, 1.6 + 1.05 * count))
    grid = figure.add_gridspec(count, 2, width_ratios=(2.2, 1))
    panels: list[Any] = []
    for row, result in enumerate(results):
        axes = figure.add_subplot(grid[row, 0], sharex=panels[0] if panels else None)
        panels.append(axes)
        times, values = _steps(result, until)
        times = [when / unit for when in times]
        axes.fill_between(times, values, step="post", color=PARTS[0][2], alpha=0.25, linewidth=0)
        axes.step(times, values, where="post", color=PARTS[0][2], linewidth=1.2)
        axes.plot(
            [when / unit for when in result.failures],
            [1.12] * len(result.failures),
            "|",
            color=PARTS[2][2],
            markersize=5,
            clip_on=False,
        )
        axes.set_ylim(0, 1.2)
        axes.set_yticks([0, 0.5, 1])
        axes.set_xlim(0, until / unit)
        axes.set_title(result.policy, loc="left", fontsize=9, color=INK, pad=2)
        _style(axes)
        axes.tick_params(labelbottom=row == count - 1)
    panels[-1].set_xlabel(f"{name}; red ticks: failures that hit a job", fontsize=8, color=MUTED)
    _bars(figure.add_subplot(grid[:, 1]), results)
    figure.suptitle(
        title or "WAF over time, as a share of the failure-free ideal", fontsize=11, color=INK, x=0.01, ha="left"
    )
    save(figure, path)


def draw_history(history: History, path: str | Path, title: str = "") -> None:
    """Draws what failures have cost a site so far, and would have cost with Unicron; see :func:`draw`."""
    failures = sorted(history.failures, key=lambda failure: failure.run.end)
    began = failures[0].run.end if failures else 0.0
    unit, name = _time_unit(failures[-1].run.end - began if failures else 0.0)
    times = [(failure.run.end - began) / unit for failure in failures]
    figure = empty(path, (10, 4.2))
    axes = figure.add_subplot()
    for what, label, colour in (("lost", "as it was", PARTS[2][2]), ("with_unicron", "with Unicron", PARTS[0][2])):
        sums = [each / 3600 for each in itertools.accumulate(getattr(failure, what) for failure in failures)]
        axes.step(times, sums, where="post", color=colour, linewidth=1.4, label=label)
    axes.set_ylim(bottom=0)
    axes.set_xlabel(f"{name} since the first failure", fontsize=8, color=MUTED)
    axes.set_ylabel("node-hours lost, waiting included", fontsize=8, color=MUTED)
    _style(axes)
    axes.legend(fontsize=8, frameon=False)
    figure.suptitle(title or "Node-hours lost to failures", fontsize=11, color=INK, x=0.01, ha="left")
    save(figure, path)


def _style(axes: Any) -> None:
    axes.grid(axis="y", color=GRID, linewidth=0.6)
    axes.tick_params(labelsize=8, colors=MUTED)
    axes.spines[["top", "right"]].set_visible(False)


def empty(path: str | Path, size: tuple[float, float]) -> Any:
    """An empty figure of `size` inches for this file. Raises PlanError for a file name other than a picture's, and
    without matplotlib."""
    if Path(path).suffix.lower() not in (".png", ".svg"):
        raise PlanError(f"a figure is a .png or .svg file, not {path}")
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise PlanError("figures need matplotlib: pip install 'unicron-slurm[sim]', or use --html") from None
    figure = Figure(figsize=size, dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def save(figure: Any, path: str | Path) -> None:
    """Writes the figure; the format follows the file's ending. Raises PlanError."""
    try:
        figure.savefig(path)
    except OSError as error:
        raise PlanError(f"can't write {path}: {error.strerror or error}") from None


def _bars(axes: Any, results: Sequence[Result]) -> None:
    """Stacked bars of useful work and losses, the first policy on top."""
    left = [0.0] * len(results)
    places = list(range(len(results)))
    for index, (_, label, colour) in enumerate(PARTS):
        widths = [max(_shares(result)[index], 0.0) for result in results]
        axes.barh(places, widths, left=left, color=colour, label=label, height=0.62, edgecolor="white", linewidth=0.8)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    for place, result in zip(places, results, strict=True):
        inside = result.efficiency > 0.2
        axes.text(
            result.efficiency - 0.01 if inside else left[place] + 0.01,
            place,
            f"{100 * result.efficiency:.1f} %",
            va="center",
            ha="right" if inside else "left",
            fontsize=8,
            color="white" if inside else INK,
        )
    axes.set_yticks(places, [result.policy for result in results], fontsize=8)
    axes.invert_yaxis()
    axes.set_xlim(0, 1)
    axes.set_xlabel("share of the ideal", fontsize=8, color=MUTED)
    axes.tick_params(labelsize=8, colors=MUTED)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.figure.legend(
        *axes.get_legend_handles_labels(), loc="outside lower right", ncols=len(PARTS), fontsize=8, frameon=False
    )


_STYLE = """
:root{color-scheme:light dark;--ink:#0b0b0b;--muted:#52514e;--grid:#e1e0d9;--page:#fcfcfb}
@media(prefers-color-scheme:dark){:root{--ink:#fff;--muted:#c3c2b7;--grid:#2c2c2a;--page:#1a1a19}}
body{font:14px/1.45 system-ui,sans-serif;color:var(--ink);background:var(--page);max-width:1000px;margin:24px auto;
padding:0 16px} h1{font-size:20px} h2{font-size:15px;margin:20px 0 4px} svg{width:100%;height:auto;display:block}
table{border-collapse:collapse;width:100%;font-variant-numeric:tabular-nums}
td,th{padding:4px 8px;text-align:right;border-bottom:1px solid var(--grid)}
td:first-child,th:first-child{text-align:left} .bar{display:flex;height:18px;gap:1px}
.key{display:inline-block;width:10px;height:10px;margin:0 4px 0 12px} .muted{color:var(--muted)}
text{fill:var(--muted);font-size:11px} .wide{overflow-x:auto}
"""


def _plot(result: Result, until: float) -> str:
    """One step plot as inline SVG."""
    width, height, left, top = 960.0, 120.0, 34.0, 14.0
    times, values = _steps(result, until)
    unit, name = _time_unit(until)

    def x(when: float) -> float:
        return left + (width - left - 6) * when / until

    def y(value: float) -> float:
        return top + (height - top - 18) * (1 - value)

    path = [f"M{x(times[0]):.1f},{y(values[0]):.1f}"]
    for when, value in zip(times[1:], values[1:], strict=True):
        path.append(f"H{x(when):.1f}V{y(value):.1f}")
    line = "".join(path)
    area = f"{line}V{y(0):.1f}H{x(times[0]):.1f}Z"
    marks = "".join(f'<path d="M{x(when):.1f},2v8" stroke="{PARTS[2][2]}"/>' for when in result.failures)
    grid = "".join(
        f'<path d="M{left},{y(v):.1f}H{width - 6}" stroke="var(--grid)"/>'
        f'<text x="{left - 4}" y="{y(v) + 4:.1f}" text-anchor="end">{v:g}</text>'
        for v in (0, 0.5, 1)
    )
    anchors = ("start", "middle", "middle", "middle", "end")
    ticks = "".join(
        f'<text x="{x(until * i / 4):.1f}" y="{height - 3}" text-anchor="{anchor}">'
        f"{until * i / 4 / unit:.3g} {name}</text>"
        for i, anchor in enumerate(anchors)
    )
    label = f"WAF of {html.escape(result.policy)} over time"
    return (
        f'<svg viewBox="0 0 {width:g} {height:g}" role="img" aria-label="{label}">'
        f'{grid}{ticks}<path d="{area}" fill="{PARTS[0][2]}" fill-opacity=".25"/>'
        f'<path d="{line}" fill="none" stroke="{PARTS[0][2]}" stroke-width="1.4"/>{marks}</svg>'
    )


def page(results: Sequence[Result], until: float, title: str = "Simulation") -> str:
    """A self-contained HTML page: table, bars and a plot per policy."""
    rows, plots = [], []
    for result in results:
        name, shares = html.escape(result.policy), _shares(result)
        bar = "".join(
            f'<span title="{label}: {100 * share:.2f} %" style="width:{100 * max(share, 0):.3f}%;'
            f'background:{colour}"></span>'
            for share, (_, label, colour) in zip(shares, PARTS, strict=True)
        )
        cells = "".join(f"<td>{100 * share:.2f} %</td>" for share in shares)
        rows.append(
            f"<tr><td>{name}</td>{cells}<td>{result.mean_waf:.4g}</td></tr>"
            f'<tr><td colspan="{len(PARTS) + 2}"><div class="bar">{bar}</div></td></tr>'
        )
        plots.append(f"<h2>{name}</h2>{_plot(result, until)}")
    heads = "".join(
        f'<th><span class="key" style="background:{colour}"></span>{label}</th>' for _, label, colour in PARTS
    )
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"<title>{html.escape(title)}</title><style>{_STYLE}</style><h1>{html.escape(title)}</h1>"
        f'<p class="muted">Shares of the failure-free ideal of {results[0].ideal_waf:.4g} weighted FLOP/s.</p>'
        f'<div class="wide"><table><tr><th>policy</th>{heads}<th>mean WAF</th></tr>{"".join(rows)}</table></div>'
        f'<p class="muted">WAF over time as a share of the ideal; red marks are failures that hit a job.</p>'
        f"{''.join(plots)}</html>\n"
    )
