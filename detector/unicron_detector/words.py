"""Words of texts for people."""

from __future__ import annotations

from collections.abc import Iterable

MOST_SPANS = 8  # of numbers in a text


def plural(count: int, what: str) -> str:
    """ "1 node", "2 nodes", "2 micro-batches"."""
    return f"{count} {what if count == 1 else _several(what)}"


def _several(what: str) -> str:
    return f"{what}{'es' if what.endswith('ch') else 's'}"


def runs(numbers: Iterable[int]) -> list[tuple[int, int]]:
    """Return the numbers, in order, as runs (first, last): 16,384 in a row are one pair."""
    pairs: list[tuple[int, int]] = []
    for number in numbers:
        if pairs and pairs[-1][1] == number - 1:
            pairs[-1] = pairs[-1][0], number
        else:
            pairs.append((number, number))
    return pairs


def number_spans(what: str, numbers: Iterable[int]) -> str:
    """ "slot 4", "slots 4-7", "slots 1, 4-7": after MOST_SPANS of them only how many more there are."""
    spans = runs(sorted(set(numbers)))
    words = [str(first) if first == last else f"{first}-{last}" for first, last in spans[:MOST_SPANS]]
    hidden = sum(last - first + 1 for first, last in spans[MOST_SPANS:])
    several = len(spans) > 1 or any(first < last for first, last in spans)
    return f"{_several(what) if several else what} {', '.join(words)}{f' and {hidden} more' if hidden else ''}"


def all_of(count: int, what: str, do: str) -> str:
    """ "all 2 members run", "its only member runs". do: the verb of several."""
    return f"its only {what} {do}s" if count == 1 else f"all {count} {what}s {do}"
