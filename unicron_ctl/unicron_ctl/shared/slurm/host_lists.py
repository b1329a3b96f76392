"""Reads Slurm's host lists, such as `gpu[001-004,007]`, and makes them from names."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable

_LONGEST = 256  # characters of a name: many long names would fill the memory
_MOST_NAMES = 65536  # of one host list: more nodes than Slurm can have


def hosts(text: str) -> list[str]:
    """Expand "n[1-2,07],m" to ["n1", "n2", "n07", "m"]; [] for a wrong list, or more nodes than Slurm can have."""
    names: list[str] = []
    for item in re.findall(r"(?:[^,\[\]]|\[[^\[\]]*\])+", text):
        room, parts = _MOST_NAMES - len(names), list[list[str]]()
        for part in re.findall(r"\[[^\[\]]*\]|[^\[\]]+", item):
            parts.append(_choices(part, room))
            if not 0 < len(parts[-1]) <= room:
                return []
            room //= len(parts[-1])
        if sum(len(part[-1]) for part in parts) > _LONGEST:
            return []
        names += map("".join, itertools.product(*parts))
    return names


def fold(names: Iterable[str]) -> str:
    """Fold ["n1", "n2", "n07", "m"] to "m,n[1-2,07]" by the last number of each name, in natural order."""
    groups: dict[tuple[str, str], list[str]] = {}
    for name in set(names):
        found = re.fullmatch(r"(.*?)(\d+)(\D*)", name)
        before, number, after = found.groups() if found else (name, "", "")
        groups.setdefault((before, after), []).append(number)
    return ",".join(_join(*around, numbers) for around, numbers in sorted(groups.items()))


def natural(name: str) -> list[tuple[int, str]]:
    """Return a key that sorts n2 before n10."""
    return [(int(part), part) if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", name)]


def _join(before: str, after: str, numbers: list[str]) -> str:
    """Join the names of one group. numbers: their digits; [""] for a name without."""
    spans: list[list[str]] = []
    for number in sorted(numbers, key=lambda text: (int(text or 0), len(text))):
        if spans and number == f"{int(spans[-1][-1]) + 1:0{len(spans[-1][0])}}":
            spans[-1][1:] = [number]
        else:
            spans.append([number])
    if len(numbers) == 1:
        return f"{before}{numbers[0]}{after}"
    return f"{before}[{','.join('-'.join(span) for span in spans)}]{after}"


def _choices(part: str, most: int) -> list[str]:
    """Return the texts for this part of a name; [] if it is wrong, more than `most` if there are too many."""
    if not part.startswith("["):
        return [part]
    found: list[str] = []
    for span in part[1:-1].split(","):
        first, _, last = span.partition("-")
        last = last or first
        numbers = first.isdecimal() and last.isdecimal() and max(len(first), len(last)) < 20
        if not numbers or int(last) - int(first) >= most:
            return []
        found += [f"{number:0{len(first)}}" for number in range(int(first), int(last) + 1)]
        if len(found) > most:
            break
    return found
