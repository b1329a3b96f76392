"""Draws which room imports which, from the code, for docs/architecture.md: two pictures and a table below each.
`python tools/draw_imports.py` writes them and prints how many statements are behind each arrow, `--check` compares them
with the code. A circle, and an arrow that goes up where pyproject.toml has layers, is an error in both."""

from __future__ import annotations

import configparser
import re
import runpy
import sys
import tomllib
from collections import Counter
from collections.abc import Collection, Iterable
from itertools import pairwise
from pathlib import Path

import grimp

ROOT = Path(__file__).resolve().parent.parent
PICTURES, DOCUMENT = ROOT / "docs" / "pictures", ROOT / "docs" / "architecture.md"
Picture = runpy.run_path(str(PICTURES / "draw.py"))["Picture"]
# A picture shows the rooms of one package: among all packages, or alone.
DRAWINGS = {"imports": ("unicron_ctl", True), "controller-imports": ("unicron_ctl.controller", False)}
BEGIN, END = "<!-- {}: made by tools/draw_imports.py -->", "<!-- end of {} -->"
TOLERANCE = 3  # points by which a share may be off before it is written anew, so that few commits change it
BOX, HEIGHT, GAP, LANE, FLOOR = 132, 34, 20, 14, 84  # pixels; a lane is where an arrow passes a floor
INK, FAINT, FILL, FENCED, OTHER = "#59636e", "#d0d7de", "#ddf4ff", "#fff8c5", "#f6f8fa"

Arrows = Counter[tuple[str, str]]  # (importer, imported) -> statements


class BadImports(Exception):
    """The rooms import each other as they must not."""


def room(module: str, opened: str) -> str:
    """The room of a module: its child of the package `opened`, or else its top-level package."""
    depth = opened.count(".") + 2 if f"{module}.".startswith(f"{opened}.") else 1
    return ".".join(module.split(".")[:depth])


def count_arrows(graph: grimp.ImportGraph, opened: str) -> Arrows:
    """How many import statements lead from room to room."""
    found: Arrows = Counter()
    for importer in graph.modules:
        for imported in graph.find_modules_directly_imported_by(importer):
            ends = room(importer, opened), room(imported, opened)
            if ends[0] != ends[1]:
                found[ends] += len(graph.get_import_details(importer=importer, imported=imported))
    return found


def floors(arrows: Iterable[tuple[str, str]], rooms: Iterable[str]) -> dict[str, int]:
    """The floor of each room: the lowest above all that it imports. Raises BadImports for a circle."""
    below: dict[str, list[str]] = {name: [] for name in rooms}
    for importer, imported in arrows:
        below[importer].append(imported)
    found: dict[str, int] = {}

    def floor(name: str, path: tuple[str, ...]) -> int:
        if name in path:
            raise BadImports(f"imports go in a circle: {' -> '.join([*path[path.index(name) :], name])}")
        if name not in found:
            found[name] = max((floor(each, (*path, name)) + 1 for each in below[name]), default=0)
        return found[name]

    return {name: floor(name, ()) for name in sorted(below)}


def check_layers(arrows: Iterable[tuple[str, str]], contracts: Iterable[dict]) -> None:
    """Raises BadImports for an arrow from a lower to a higher layer of a contract."""
    for contract in contracts:
        for container in contract.get("containers", [""]) if contract["type"] == "layers" else ():
            prefix = f"{container}." if container else ""
            layer_of = {
                prefix + name.strip(" ()"): number
                for number, layer in enumerate(contract["layers"])
                for name in re.split("[|:]", layer)
            }
            for ends in arrows:
                layers = [
                    number for end in ends for name, number in layer_of.items() if f"{end}.".startswith(f"{name}.")
                ]
                if len(layers) == 2 and layers[0] > layers[1]:
                    raise BadImports(f"{ends[0]} imports {ends[1]}, which is above it (contract {contract['id']!r})")


def necessary(arrows: Iterable[tuple[str, str]]) -> set[tuple[str, str]]:
    """The arrows that no longer path implies."""
    reached: dict[str, set[str]] = {}
    for importer, imported in arrows:
        reached.setdefault(importer, set()).add(imported)

    def all_below(name: str) -> set[str]:
        return reached.get(name, set()).union(*(all_below(each) for each in reached.get(name, ())))

    return {
        (importer, imported)
        for importer, imported in arrows
        if not any(imported in all_below(each) for each in reached[importer])
    }


def arrange(floor_of: dict[str, int], arrows: set[tuple[str, str]]) -> tuple[list[list[str]], list[list[str]]]:
    """(what stands on each floor from the left, the stations of each arrow). An arrow that passes a floor has a lane
    there, whose name begins with a space."""
    rows: list[list[str]] = [[] for _ in range(max(floor_of.values()) + 1)]
    for name, number in sorted(floor_of.items()):
        rows[number].append(name)
    paths = []
    for importer, imported in sorted(arrows):
        lanes = range(floor_of[importer] - 1, floor_of[imported], -1)
        path = [importer, *(f" {importer} {imported} {number}" for number in lanes), imported]
        for number, lane in zip(lanes, path[1:-1], strict=True):
            rows[number].append(lane)
        paths.append(path)
    steps = [step for path in paths for step in pairwise(path)]
    for _ in range(8):  # down and up again: each stands where its neighbours stand on average
        for side, numbers in ((0, range(len(rows) - 2, -1, -1)), (1, range(1, len(rows)))):
            for number in numbers:
                place = places(rows)
                near = {
                    name: [place[step[side]] for step in steps if step[1 - side] == name] or [place[name]]
                    for name in rows[number]
                }
                means = {name: (round(sum(each) / len(each), 3), name) for name, each in near.items()}
                rows[number].sort(key=means.__getitem__)
    return rows, paths


def places(rows: list[list[str]]) -> dict[str, float]:
    """The middle of each room and lane, in pixels from the middle of its floor."""
    found = {}
    for row in rows:
        widths = [LANE if name.startswith(" ") else BOX for name in row]
        x = -(sum(widths) + GAP * (len(row) - 1)) / 2
        for name, width in zip(row, widths, strict=True):
            found[name] = x + width / 2
            x += width + GAP
    return found


def draw(arrows: Arrows, floor_of: dict[str, int], opened: str, fenced: Collection[str]) -> str:
    """The picture as SVG: each room above all that it imports. `fenced`: the rooms that can be removed."""
    direct = necessary(arrows)
    rows, paths = arrange(floor_of, direct)
    place = places(rows)
    half = max(abs(x) for x in place.values()) + BOX / 2 + 12
    picture = Picture(round(2 * half), FLOOR * (len(rows) - 1) + HEIGHT + 40, f"Who imports whom: {opened}")
    level = {name: 20 + FLOOR * (len(rows) - 1 - number) for number, row in enumerate(rows) for name in row}
    for path in [*map(list, sorted(set(arrows) - direct)), *paths]:
        line = f"M {place[path[0]] + half:.0f} {level[path[0]] + HEIGHT}"
        for above, below in pairwise(path):
            x1, y1 = place[above] + half, level[above] + HEIGHT
            x2, y2 = place[below] + half, level[below]
            line += f" C {x1:.0f} {y1 + 22} {x2:.0f} {y2 - 22} {x2:.0f} {y2}"
            line += f" v {HEIGHT}" if below.startswith(" ") else ""
        if (path[0], path[-1]) in direct:
            picture.arrow(line)
        else:
            picture.parts.append(f'<path d="{line}" fill="none" stroke="{FAINT}" stroke-width="1"/>')
    for name in sorted(floor_of):
        fill = FENCED if name in fenced else FILL if name.startswith(f"{opened}.") else OTHER
        picture.box(place[name] + half - BOX / 2, level[name], BOX, HEIGHT, fill)
        label = name.removeprefix(f"{opened}.")
        picture.text(place[name] + half, level[name] + 22, label, 12.5, text_anchor="middle")
    return picture.svg()


def shares(rooms: Iterable[str], opened: str, modules: Iterable[str]) -> dict[str, float]:
    """The percentage of lines that each room has: of the package `opened` if it is one of its rooms, else of all."""
    lines: Counter[str] = Counter()
    for module in modules:
        stem = next(ROOT.glob(f"*/{module.partition('.')[0]}")).parent / module.replace(".", "/")
        path = stem / "__init__.py" if stem.is_dir() else stem.with_suffix(".py")
        for part in {"", room(module, opened), opened if f"{module}.".startswith(f"{opened}.") else ""}:
            lines[part] += path.read_bytes().count(b"\n")
    return {name: 100 * lines[name] / lines[opened if name.startswith(f"{opened}.") else ""] for name in rooms}


def table(arrows: Arrows, floor_of: dict[str, int], share_of: dict[str, float], old: str, opened: str) -> str:
    """The rooms from the top. A share that stands in the `old` text stays if it is nearly right."""
    written = {name: int(share) for name, share in re.findall(r"^\| `([\w.]+)` \| (\d+) % ", old, re.MULTILINE)}
    rows = ["| room | lines | imports |", "|---|---|---|"]
    for name in sorted(floor_of, key=lambda each: (-floor_of[each], each)):
        short, share = name.removeprefix(f"{opened}."), share_of[name]
        if abs(written.get(short, -100) - share) <= TOLERANCE:
            share = written[short]
        imported = sorted(low.removeprefix(f"{opened}.") for high, low in arrows if high == name)
        rows.append(f"| `{short}` | {share:.0f} % | {', '.join(f'`{each}`' for each in imported) or '-'} |")
    return "\n".join(rows)


def main(arguments: list[str]) -> int:
    """Writes pictures and tables, or with --check says that they differ from the code; 1 then, and for bad imports."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    fenced = re.findall(r"= (\S+)", setup["options.entry_points"]["unicronctl.rooms"])
    graph = grimp.build_graph(*settings["root_packages"], cache_dir=None)
    text = before = DOCUMENT.read_text()
    files = {}
    for name, (opened, with_all) in DRAWINGS.items():
        rooms = {room(module, opened) for module in graph.modules} - {opened, opened.partition(".")[0]}
        rooms = {each for each in rooms if with_all or each.startswith(f"{opened}.")}
        arrows = Counter({ends: n for ends, n in count_arrows(graph, opened).items() if rooms.issuperset(ends)})
        try:
            check_layers(arrows, settings["contracts"])
            floor_of = floors(arrows, rooms)
        except BadImports as error:
            print(f"tools/draw_imports.py: {error}", file=sys.stderr)
            return 1
        files[PICTURES / f"{name}.svg"] = draw(arrows, floor_of, opened, fenced)
        begin, end = BEGIN.format(name), END.format(name)
        head, found, rest = text.partition(begin)
        old, closed, tail = rest.partition(end)
        if not found or not closed:
            print(f"docs/architecture.md: the lines `{begin}` and `{end}` are gone: put them back", file=sys.stderr)
            return 1
        made = table(arrows, floor_of, shares(rooms, opened, graph.modules), old, opened)
        text = f"{head}{begin}\n\n{made}\n\n{end}{tail}"
        if "--check" not in arguments:
            for (importer, imported), count in sorted(arrows.items()):
                print(f"{count:4} {importer} -> {imported}")
    stale = text != before or any(not path.is_file() or path.read_text() != made for path, made in files.items())
    if stale and "--check" in arguments:
        print(
            "docs/architecture.md: its imports are not the code's: run `python tools/draw_imports.py`", file=sys.stderr
        )
        return 1
    for path, made in {**files, DOCUMENT: text}.items() if stale else ():
        path.write_text(made)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
