"""Node names as Slurm writes them: n[1-3,7],login2."""

from __future__ import annotations

import re
from collections.abc import Iterable

_NUMBERED = re.compile(r"(.*?)(\d+)$")


def fold(names: Iterable[str]) -> str:
    """All names in as few words as Slurm's notation takes, in the order of their numbers; each counts once.

    Only the number at a name's end is folded. Numbers with leading zeros are folded with those of the same width.
    """
    plain: list[str] = []
    numbered: dict[tuple[str, int], list[int]] = {}  # (text before the number, digits if fixed) -> numbers
    for name in dict.fromkeys(names):
        found = _NUMBERED.fullmatch(name)
        if found is None:
            plain.append(name)
        else:
            head, digits = found.groups()
            width = len(digits) if digits.startswith("0") and len(digits) > 1 else 0
            numbered.setdefault((head, width), []).append(int(digits))
    _join_widths(numbered)
    groups = [_group(head, width, sorted(numbers)) for (head, width), numbers in numbered.items()]
    return ",".join(sorted([*plain, *groups]))


def _join_widths(numbered: dict[tuple[str, int], list[int]]) -> None:
    """Moves n10 to n07 and n08: a number that fills the width of padded ones belongs with them."""
    for head, width in [key for key in numbered if key[1]]:
        rest = numbered.get((head, 0), [])
        fitting = [number for number in rest if len(str(number)) == width]
        numbered[head, width] += fitting
        if left := [number for number in rest if number not in fitting]:
            numbered[head, 0] = left
        else:
            numbered.pop((head, 0), None)


def _group(head: str, width: int, numbers: list[int]) -> str:
    if len(numbers) == 1:
        return f"{head}{numbers[0]:0{width}d}"
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    parts = [f"{a:0{width}d}" if a == b else f"{a:0{width}d}-{b:0{width}d}" for a, b in runs]
    return f"{head}[{','.join(parts)}]"
