"""Draws the pictures of the documents as SVG: `python docs/pictures/draw.py` writes them, `--check` compares them.

Figures come from docs/leaderboard.json and docs/transition.json, terminal pictures from recorded output, `*.ansi`;
`stories.py` records those of docs/trusted.md.
"""

from __future__ import annotations

import json
import re
import statistics
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from xml.sax.saxutils import escape

HERE = Path(__file__).resolve().parent
FIGURES, SIZES = HERE.parent / "leaderboard.json", HERE.parent / "transition.json"

# Every picture stands on a card of its own, so it can be read on a light and on a dark page.
PAPER, INK, SOFT, LINE = "#ffffff", "#1f2328", "#59636e", "#8c959f"
BLUE, GREEN, RED, AMBER, GREY, VIOLET = "#0969da", "#2da44e", "#cf222e", "#bf8700", "#afb8c1", "#8250df"
BLUE_FILL, GREEN_FILL, RED_FILL, AMBER_FILL, GREY_FILL = "#ddf4ff", "#dafbe1", "#ffebe9", "#fff8c5", "#f6f8fa"
SANS = "Helvetica, Arial, 'Liberation Sans', sans-serif"
MONO = "'DejaVu Sans Mono', Menlo, Consolas, monospace"


class Picture:
    """An SVG drawing of fixed size in pixels, made of a list of elements."""

    def __init__(self, width: int, height: int, title: str, background: str = PAPER) -> None:
        self.width, self.height = width, height
        marks = "".join(
            f'<marker id="{name}" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" markerHeight="7" '
            f'orient="auto-start-reverse"><path d="M0 1 L10 5 L0 9 z" fill="{colour}"/></marker>'
            for name, colour in (("arrow", SOFT), ("red", RED), ("green", GREEN), ("blue", BLUE))
        )
        self.parts = [
            f"<title>{escape(title)}</title>",
            f"<defs>{marks}</defs>",
            f'<rect x="0.5" y="0.5" width="{width - 1}" height="{height - 1}" rx="8" fill="{background}" '
            f'stroke="{GREY}"/>',
        ]

    def box(self, x: float, y: float, width: float, height: float, fill: str, stroke: str = LINE, **more: str) -> None:
        """Add a rectangle; `more` are further SVG attributes, with `_` for `-`."""
        self.parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="4" fill="{fill}" '
            f'stroke="{stroke}"{_attributes(more)}/>'
        )

    def text(self, x: float, y: float, words: str, size: float = 13, fill: str = INK, **more: str) -> None:
        """Add text; its baseline starts at (x, y)."""
        self.parts.append(
            f'<text x="{x:g}" y="{y:g}" font-family="{more.pop("family", SANS)}" font-size="{size:g}" '
            f'fill="{fill}"{_attributes(more)}>{escape(words)}</text>'
        )

    def lines(self, x: float, y: float, rows: list[str], size: float = 12, fill: str = SOFT, **more: str) -> None:
        """Add several lines of text below each other."""
        for number, row in enumerate(rows):
            self.text(x, y + number * size * 1.35, row, size, fill, **more)

    def card(self, x: float, y: float, width: float, height: float, head: str, rows: list[str], fill: str) -> None:
        """Add a box with a bold first line and small ones below."""
        self.box(x, y, width, height, fill)
        self.text(x + 10, y + 20, head, 13, font_weight="bold")
        self.lines(x + 10, y + 38, rows, 11.5)

    def arrow(self, path: str, mark: str = "arrow", both: bool = False, dashed: bool = False) -> None:
        """Add a line along the SVG path, with a head at its end, or at both."""
        colour = {"arrow": SOFT, "red": RED, "green": GREEN, "blue": BLUE}[mark]
        self.parts.append(
            f'<path d="{path}" fill="none" stroke="{colour}" stroke-width="1.6" marker-end="url(#{mark})"'
            + (f' marker-start="url(#{mark})"' if both else "")
            + (' stroke-dasharray="5 4"' if dashed else "")
            + "/>"
        )

    def rule(self, x1: float, y1: float, x2: float, y2: float, colour: str = GREY, **more: str) -> None:
        """Add a thin straight line."""
        self.parts.append(
            f'<line x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}" stroke="{colour}"{_attributes(more)}/>'
        )

    def svg(self) -> str:
        """The whole file."""
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{self.width}" height="{self.height}" '
            f'viewBox="0 0 {self.width} {self.height}">'
        )
        return "\n".join([head, *self.parts, "</svg>"]) + "\n"


def _attributes(more: dict[str, str]) -> str:
    return "".join(f' {name.replace("_", "-")}="{value}"' for name, value in more.items())


def architecture() -> Picture:
    """Who runs where, and who talks to whom."""
    picture = Picture(900, 520, "Architecture: login node, head node and compute nodes, and who talks to whom")
    picture.card(20, 52, 200, 76, "login node", ["unicronctl", "sbatch --unicron train.sbatch"], GREY_FILL)
    picture.box(340, 16, 540, 150, GREY_FILL)
    picture.text(352, 36, "head node", font_weight="bold")
    picture.card(355, 48, 250, 104, "unicrond, the controller", [], BLUE_FILL)
    picture.lines(
        365,
        86,
        ["detects, judges, decides, acts", "event log (SQLite): its whole state", "planner: nodes for each job"],
        11.5,
    )
    picture.card(715, 48, 152, 104, "slurmctld", ["its record decides", "whose a job is and", "where it runs"], PAPER)
    picture.arrow("M 605 100 L 713 100", both=True)
    picture.text(613, 92, "scontrol, squeue", 11, SOFT)
    picture.arrow("M 220 90 L 353 90", both=True)
    picture.text(238, 82, "ZeroMQ, CURVE", 11, SOFT)
    for x, name, first in ((20, "compute node 1", 0), (480, "compute node 2", 2)):
        picture.box(x, 250, 400, 254, GREY_FILL)
        picture.text(x + 12, 270, name, font_weight="bold")
        picture.card(x + 15, 284, 232, 88, "unicron-agent", [], BLUE_FILL)
        agent = ["parent of the ranks; heartbeats", "copies of the state, in memory", "rendezvous store, zygote"]
        picture.lines(x + 25, 322, agent, 11.5)
        picture.card(x + 262, 284, 124, 88, "Slurm's side", ["SPANK plugin", "prolog, epilog", "health checks"], PAPER)
        for number in range(2):
            left = x + 15 + number * 192
            picture.card(
                left,
                424,
                179,
                68,
                f"rank {first + number}",
                ["your training script", "with unicron.Session"],
                GREEN_FILL,
            )
            picture.arrow(
                f"M {left + (60 if number == 0 else 20)} 422 L {left + (60 if number == 0 else 20)} 374", both=True
            )
        picture.text(x + 84, 414, "Unix socket", 11, SOFT)
    picture.arrow("M 190 282 L 190 200 L 400 200 L 400 154", both=True)
    picture.arrow("M 660 282 L 660 200 L 530 200 L 530 154", both=True)
    picture.lines(120, 180, ["ZeroMQ over TCP, encrypted:", "one message for all ranks of a node"], 11)
    picture.arrow("M 800 282 L 800 190 L 570 190 L 570 154", dashed=True)
    picture.text(640, 184, "UDP hints, health reports", 11, SOFT)
    picture.arrow("M 388 458 L 493 458", mark="green", both=True)
    picture.text(410, 478, "NCCL or gloo", 11, GREEN)
    picture.arrow("M 240 282 L 240 236 L 620 236 L 620 282", dashed=True, both=True)
    picture.text(252, 229, "copies of the state; consensus while unicrond is away", 11, SOFT)
    return picture


def median(failure: str, system: str, field: str) -> float | None:
    """The median of a figure over all repetitions; None where some run never reached it."""
    rows = [
        row for row in json.loads(FIGURES.read_text()) if (row.get("failure"), row.get("system")) == (failure, system)
    ]
    values = [row.get(field) for row in rows]
    return statistics.median(values) if values and all(value is not None for value in values) else None


def healing() -> Picture:
    """What happens after the death of one rank of four, beside torchrun, from the leaderboard's figures."""
    picture = Picture(900, 330, "Time line of a healing: Unicron's session mode beside torchrun")
    left, right, most = 240.0, 870.0, 10.0

    def at(seconds: float) -> float:
        return left + (right - left) * seconds / most

    picture.text(20, 30, "One of four ranks is killed at 0 s. Who trains when?", 15, font_weight="bold")
    picture.text(
        20,
        50,
        "Medians of five runs on two cores, 2026-11-24 (docs/leaderboard.json); an iteration takes 0.15 s.",
        11.5,
        SOFT,
    )
    ours_next, ours_full = (
        _known("rank-kill", "unicron", "next_step_seconds"),
        _known("rank-kill", "unicron", "full_strength_seconds"),
    )
    theirs = _known("rank-kill", "torchrun", "full_strength_seconds")
    for y, name, stop, whole in ((80, "Unicron, session", ours_next, ours_full), (190, "torchrun", theirs, theirs)):
        picture.text(20, y + 15, name, 13, font_weight="bold")
        for rank in range(4):
            top = y + 22 * rank
            picture.text(172, top + 13, f"rank {rank}", 11, SOFT)
            killed = rank == 2
            begin = whole if killed else stop
            picture.box(left - 20, top, 20, 16, GREEN, "none")
            if killed or name == "torchrun":
                picture.box(left, top, at(begin) - left, 16, RED_FILL, RED)
            else:
                picture.box(left, top, at(begin) - left, 16, AMBER_FILL, AMBER)
            picture.box(at(begin), top, right - at(begin), 16, GREEN, "none")
    picture.rule(left, 72, left, 282, RED, stroke_width="2")
    again = {system: _known("rank-kill", system, "micro_batches_again") for system in ("unicron", "torchrun")}
    ours = (
        f"next step after {ours_next:.2f} s, four ranks after {ours_full:.2f} s; "
        f"{again['unicron']:.0f} micro-batch computed again"
    )
    picture.text(at(ours_full) + 12, 93, ours, 12, PAPER)
    all_again = (
        f"all start again from a checkpoint: {theirs:.2f} s; {again['torchrun']:.0f} micro-batches computed again"
    )
    picture.text(at(0.2), 203, all_again, 12, RED)
    for second in range(0, 11, 2):
        picture.rule(at(second), 282, at(second), 287, LINE)
        picture.text(at(second), 300, f"{second} s", 11, SOFT, text_anchor="middle")
    for x, fill, stroke, words in (
        (240, GREEN, "none", "trains"),
        (320, AMBER_FILL, AMBER, "regroups; keeps its work of the iteration"),
        (590, RED_FILL, RED, "has no process, or is starting"),
    ):
        picture.box(x, 309, 14, 12, fill, stroke)
        picture.text(x + 20, 319, words, 11.5, SOFT)
    return picture


def _known(failure: str, system: str, field: str) -> float:
    value = median(failure, system, field)
    assert value is not None, (failure, system, field)
    return value


def modes() -> Picture:
    """What becomes of four ranks after the death of one, in each mode."""
    picture = Picture(900, 360, "The two modes: healed within the iteration, and healed by a restart")
    for y, head, said in (
        (
            24,
            "Session mode: the script uses unicron.Session",
            "The survivors share the lost micro-batches and step. The new process joins between two iterations.",
        ),
        (
            196,
            "Restart mode: any script that torchrun could start",
            "All processes end. A new world starts from the newest state that the script has saved.",
        ),
    ):
        picture.text(20, y, head, 14, font_weight="bold")
        picture.text(20, y + 18, said, 12, SOFT)
    death, x0 = 300.0, 90.0
    for rank in range(4):
        top = 54 + 24 * rank
        picture.text(20, top + 14, f"rank {rank}", 12, SOFT)
        picture.text(20, top + 186, f"rank {rank}", 12, SOFT)
        for first, last, words in ((x0, 200.0, "iteration 7"), (204.0, death, "iteration 8")):
            picture.box(first, top, last - first, 18, GREEN_FILL, GREEN)
            picture.box(first, top + 172, last - first, 18, GREEN_FILL, GREEN)
            if rank == 0:
                picture.text(first + 12, top + 13, words, 11)
                picture.text(first + 12, top + 185, words, 11)
        if rank == 2:
            picture.box(death, top, 224, 18, RED_FILL, RED, stroke_dasharray="4 3")
            picture.text(death + 10, top + 13, "new process, forked warm", 11, RED)
            picture.box(528, top, 132, 18, GREEN_FILL, GREEN)
            picture.box(664, top, 132, 18, GREEN_FILL, GREEN)
        else:
            picture.box(death, top, 18, 18, AMBER_FILL, AMBER)
            picture.box(318, top, 74, 18, GREEN_FILL, GREEN)
            for first, last in ((396.0, 524.0), (528.0, 660.0), (664.0, 796.0)):
                picture.box(first, top, last - first, 18, GREEN_FILL, GREEN)
            if rank == 0:
                for first, words in (
                    (323.0, "8, goes on"),
                    (408.0, "iteration 9"),
                    (540.0, "iteration 10"),
                    (676.0, "iteration 11"),
                ):
                    picture.text(first, top + 13, words, 11)
        below = top + 172
        picture.box(death, below, 180, 18, RED_FILL, RED, stroke_dasharray="4 3")
        if rank == 0:
            picture.text(death + 10, below + 13, "all start again", 11, RED)
        picture.box(484, below, 140, 18, AMBER_FILL, AMBER)
        for first, last, words in ((628.0, 732.0, "iteration 8"), (736.0, 840.0, "iteration 9")):
            picture.box(first, below, last - first, 18, GREEN_FILL, GREEN)
            if rank == 0:
                picture.text(first + 12, below + 13, words, 11)
        if rank == 0:
            picture.text(492, below + 13, "work since the save", 11)
    for y in (50, 222):
        picture.rule(death, y, death, y + 104, RED, stroke_width="2")
    picture.text(death + 6, 160, "rank 2 dies", 11.5, RED)
    picture.text(death + 6, 332, "rank 2 dies", 11.5, RED)
    return picture


def node_life() -> Picture:
    """The states of a node, and what leads from one to the next."""
    picture = Picture(900, 420, "A node's life: in service, suspect, drained or down, and back")
    picture.card(340, 30, 220, 64, "in service", ["runs elements, or is free"], GREEN_FILL)
    picture.card(
        20,
        170,
        240,
        84,
        "suspect (still in service)",
        ["jobs that left it avoid it for a day;", "others are not touched"],
        AMBER_FILL,
    )
    picture.card(340, 300, 220, 84, "drained", ["what runs there goes on;", "no new work"], RED_FILL)
    picture.card(656, 170, 224, 84, "down", ["Slurm ends what runs there", "and requeues the elements"], RED_FILL)
    picture.arrow("M 340 70 L 150 70 L 150 168", mark="red")
    picture.lines(20, 36, ["a job left it because of its hardware,", "or two faults in a day, or it was lost"], 11.5)
    picture.arrow("M 220 168 L 220 120 L 400 120 L 400 96", mark="green")
    picture.lines(234, 140, ["a pair test passes,", "or a day is over"], 11.5)
    picture.arrow("M 560 70 L 800 70 L 800 168", mark="red")
    picture.lines(576, 36, ["shown dead by its lease and other evidence,", "and no other job runs there"], 11.5)
    picture.arrow("M 730 168 L 730 120 L 500 120 L 500 96", mark="green")
    picture.lines(512, 138, ["slurmd was restarted or has", "answered for 10 s; checks allow it"], 11.5)
    picture.arrow("M 470 96 L 470 298", mark="red")
    picture.lines(478, 205, ["root's checks prove it bad,", "or it is shown dead while", "other jobs run there"], 11.5)
    picture.arrow("M 420 298 L 420 96", mark="green")
    picture.lines(285, 205, ["its checks pass (and", "the pair test, where", "that had failed)"], 11.5)
    picture.arrow("M 140 256 L 140 342 L 338 342", mark="red", dashed=True)
    picture.lines(30, 366, ["proven bad by its checks or by", "unicronctl pair-test --drain"], 11.5)
    picture.arrow("M 562 342 L 768 342 L 768 256", mark="red", dashed=True)
    picture.lines(590, 366, ["Slurm itself, after SlurmdTimeout"], 11.5)
    return picture


SYSTEMS = (
    ("unicron", "Unicron, session mode", BLUE),
    ("unicron-restart", "Unicron, restart mode", VIOLET),
    ("torchft", "torchft", GREEN),
    ("nvrx-inprocess", "NVRx in-process", AMBER),
    ("nvrx-launcher", "NVRx ft_launcher", "#953800"),
    ("torchrun", "torchrun", RED),
    ("slurm-requeue", "requeue by Slurm", SOFT),
)
FAILURES = (
    ("rank-kill", "a rank killed"),
    ("exception", "an exception"),
    ("two", "two ranks killed"),
    ("hang", "a hang"),
    ("node", "a node's power-off"),
    ("rank0-node", "rank 0's node"),
)


def leaderboard() -> Picture:
    """Seconds to the next optimizer step after each failure, by system, on a logarithmic scale."""
    row, gap, top, left, right = 13, 16, 92, 160.0, 850.0
    height = top + len(FAILURES) * (len(SYSTEMS) * row + gap) + 40
    picture = Picture(900, height, "Leaderboard: seconds from the failure to the next optimizer step")
    picture.text(
        20,
        30,
        "Seconds from the failure to the next optimizer step (logarithmic; shorter is better)",
        15,
        font_weight="bold",
    )
    picture.text(
        20, 50, "Medians of five runs, four ranks on two cores, 2026-11-24, 84cd80c (docs/leaderboard.json)", 11.5, SOFT
    )
    x = 20.0
    for _, label, colour in SYSTEMS:
        picture.box(x, 62, 11, 11, colour, "none")
        picture.text(x + 16, 72, label, 11, SOFT)
        x += 26 + 6.1 * len(label)

    def at(seconds: float) -> float:
        return left + (right - left) * (_log(seconds) - _log(0.1)) / (_log(60.0) - _log(0.1))

    bottom = height - 34
    for tick in (0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0):
        picture.rule(at(tick), top - 6, at(tick), bottom, "#d8dee4")
        picture.text(at(tick), bottom + 16, f"{tick:g} s", 11, SOFT, text_anchor="middle")
    y = float(top)
    for failure, label in FAILURES:
        picture.text(20, y + len(SYSTEMS) * row / 2 + 4, label, 13)
        for system, _, colour in SYSTEMS:
            seconds = _known(failure, system, "next_step_seconds")
            picture.box(left, y, at(seconds) - left, row - 2, colour, "none")
            picture.text(at(seconds) + 4, y + 10, f"{seconds:.2f}", 10, SOFT)
            y += row
        y += gap
    return picture


def transition() -> Picture:
    """Seconds to the next step and to full strength by the number of ranks, both axes logarithmic."""
    report = json.loads(SIZES.read_text())
    rows = [row for row in report["details"]["rows"] if not row["idle"]]
    colours = {name: colour for name, _, colour in SYSTEMS}
    names, counts = (list(dict.fromkeys(row[part] for row in rows)) for part in ("system", "ranks"))
    picture = Picture(900, 400, "Seconds from the kill of a rank, by the number of ranks")
    picture.text(20, 30, "Seconds from the kill of a rank (logarithmic; lower is better)", 15, font_weight="bold")
    words = f"All ranks on two cores, {report['details']['day']}, {report['commit']} (docs/transition.json)"
    picture.text(20, 50, words, 11.5, SOFT)
    for number, (field, head) in enumerate((("next_step", "to the next step"), ("full_strength", "to full strength"))):
        left, bottom = 60.0 + 430 * number, 360.0
        spans = [left + 300 * _log(count / counts[0]) / _log(max(counts[-1] / counts[0], 2)) for count in counts]
        heights = {tick: bottom - 270 * (_log(tick) + 1) / 4 for tick in (0.1, 1.0, 10.0, 100.0, 1000.0)}
        picture.text(left, 78, head, 13)
        for tick, y in heights.items():
            picture.rule(left - 8, y, left + 308, y, "#d8dee4")
            picture.text(left - 12, y + 4, f"{tick:g}", 11, SOFT, text_anchor="end")
        for x, count in zip(spans, counts, strict=True):
            picture.text(x, bottom + 18, f"{count}", 11, SOFT, text_anchor="middle")
        for name in names:
            found = [[row[field] for row in rows if (row["system"], row["ranks"]) == (name, count)] for count in counts]
            known = [(x, [each for each in some if each]) for x, some in zip(spans, found, strict=True)]
            points = [(x, bottom - 270 * (_log(statistics.median(some)) + 1) / 4) for x, some in known if some]
            for (x1, y1), (x2, y2) in pairwise(points):
                picture.rule(x1, y1, x2, y2, colours[name], stroke_width="2")
            for x, y in points:
                picture.box(x - 3, y - 3, 6, 6, colours[name], "none")
            if points:
                picture.text(points[-1][0] + 8, points[-1][1] + 4, name, 11, colours[name])
    return picture


def soundness() -> Picture:
    """What the commit of an iteration decides."""
    picture = Picture(900, 350, "What the commit of an iteration decides, and what follows")
    picture.card(20, 120, 170, 86, "iteration", ["forward, backward, reduce,", "norm of the gradient"], BLUE_FILL)
    picture.card(
        250,
        104,
        196,
        118,
        "commit",
        ["losses and norms finite?", "within the band?", "audit: same gradient?", "compare: same state?"],
        BLUE_FILL,
    )
    picture.arrow("M 190 163 L 248 163")
    picture.card(
        520,
        16,
        360,
        70,
        "step",
        ["compared and audited: its state is verified, and its image", "and checkpoint are kept until the next one is"],
        GREEN_FILL,
    )
    picture.arrow("M 400 104 L 400 50 L 518 50", mark="green")
    picture.text(410, 42, "all is well", 11, GREEN)
    picture.card(
        520,
        108,
        360,
        102,
        "no step: others compute its micro-batches again",
        [
            "sound there: step; the first rank is suspected, its node left",
            "not sound there either: the data or the model is at fault:",
            "on_bad_batch ends the job, or leaves the micro-batch out",
        ],
        AMBER_FILL,
    )
    picture.arrow("M 446 160 L 518 160")
    picture.text(452, 152, "not finite", 11, SOFT)
    picture.card(
        520,
        234,
        360,
        100,
        "no step: all go back to the last verified state",
        [
            "in their processes; what was kept since is set aside",
            "most of three replicas agree: the other one's node is left",
            "no majority: nobody is blamed",
        ],
        RED_FILL,
    )
    picture.arrow("M 400 222 L 400 284 L 518 284", mark="red")
    picture.text(410, 276, "different", 11, RED)
    picture.arrow("M 700 336 L 700 343 L 105 343 L 105 208", dashed=True)
    return picture


def _log(value: float) -> float:
    """The logarithm, rounded so that all platforms draw the same."""
    from math import log10

    return round(log10(value), 9)


COLOURS = {31: "#ff7b72", 32: "#7ee787", 33: "#d29922", 34: "#79c0ff", 35: "#d2a8ff", 36: "#76e3ea", 37: "#e6edf3"}
PLAIN, DARK, CELL, PITCH = "#e6edf3", "#0d1117", 7.83, 17
# Box characters are drawn as lines, for fonts differ in them: which of left, right, up and down each one has.
BOXES = {
    character: sides
    for sides, characters in {
        "lr": "─━", "ud": "│┃", "rd": "┌┏", "ld": "┐┓", "ru": "└┗", "lu": "┘┛",
        "rud": "├┡", "lud": "┤┩", "lrd": "┬┳", "lru": "┴┻", "lrud": "┼╇",
    }.items()
    for character in characters
}  # fmt: skip


def terminal(name: str, title: str) -> Picture:
    """Recorded output of a terminal, with its colours (SGR codes 1 and 30 to 37)."""
    rows = re.sub(r"(\s|\x1b\[0m)+$", "", (HERE / f"{name}.ansi").read_text()).split("\n")
    columns = max(len(re.sub(r"\x1b\[[0-9;]*m", "", row).rstrip()) for row in rows)
    picture = Picture(round(columns * CELL) + 40, len(rows) * PITCH + 64, title, DARK)
    for number, colour in enumerate(("#ff5f56", "#ffbd2e", "#27c93f")):
        picture.parts.append(f'<circle cx="{22 + 18 * number}" cy="20" r="5.5" fill="{colour}"/>')
    picture.text(84, 25, title, 12, "#8b949e")
    for line, row in enumerate(rows):
        column, colour, bold = 0, PLAIN, False
        for code, words in re.findall(r"(?:\x1b\[([0-9;]*)m)?([^\x1b]*)", row):
            for number in (int(part or 0) for part in code.split(";")) if code else ():
                colour, bold = (PLAIN, False) if number == 0 else (COLOURS.get(number, colour), bold or number == 1)
            _cells(
                picture, column, 56 + line * PITCH, words, {"fill": colour} | ({"font_weight": "bold"} if bold else {})
            )
            column += len(words)
    return picture


def _cells(picture: Picture, column: int, y: float, words: str, style: dict[str, str]) -> None:
    """Draw one run of characters: lines for boxes, and each group of words where it begins."""
    path = []
    for index, character in enumerate(words):
        x, middle = 20 + (column + index) * CELL, y - 4.5
        for side in BOXES.get(character, ""):
            dx, dy = {"l": (-CELL / 2, 0.0), "r": (CELL / 2, 0.0), "u": (0.0, -PITCH / 2), "d": (0.0, PITCH / 2)}[side]
            path.append(f"M{x + CELL / 2:.1f} {middle:.1f}l{dx:.1f} {dy:.1f}")
    if path:
        picture.parts.append(f'<path d="{"".join(path)}" stroke="#6e7681" stroke-width="1.2" fill="none"/>')
    for found in re.finditer(rf"[^\s{''.join(BOXES)}]+(?: [^\s{''.join(BOXES)}]+)*", words):
        length = {"textLength": f"{len(found[0]) * CELL:.1f}", "lengthAdjust": "spacingAndGlyphs"}
        picture.text(20 + (column + found.start()) * CELL, y, found[0], 13, family=MONO, **style, **length)


PICTURES: dict[str, Callable[[], Picture]] = {
    "architecture": architecture,
    "healing": healing,
    "modes": modes,
    "node-life": node_life,
    "leaderboard": leaderboard,
    "transition": transition,
    "soundness": soundness,
    "demo": lambda: terminal("demo", "make demo"),
    "status": lambda: terminal("status", "unicronctl top"),
    "trusted-nan": lambda: terminal("trusted-nan", "a NaN in a gradient, once"),
    "trusted-flip": lambda: terminal("trusted-flip", "a flipped bit in a weight"),
    "trusted-slow": lambda: terminal("trusted-slow", "a rank at half speed"),
}


def main(arguments: list[str]) -> int:
    """Write all pictures, or with --check say which differ from what would be written; 1 if any does."""
    stale = []
    for name, draw in PICTURES.items():
        path, fresh = HERE / f"{name}.svg", draw().svg()
        if path.is_file() and path.read_text() == fresh:
            continue
        stale.append(path.name)
        if "--check" not in arguments:
            path.write_text(fresh)
    if stale and "--check" in arguments:
        print(f"docs/pictures: out of date: {', '.join(stale)}: run `python docs/pictures/draw.py`", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
