"""Words of texts for people."""

from __future__ import annotations

from collections.abc import Iterable

MOST_SPANS = 8  # of numbers in a text


def plural(count: int, what: str) -> str:
    """ "1 node", "2 nodes"."""
    return f"{count} {what}{'' if count == 1 else 's'}"


def number_spans(what: str, numbers: Iterable[int]) -> str:
    """ "slot 4", "slots 4-7", "slots 1, 4-7": after MOST_SPANS of them only how many more there are."""
    spans: list[list[int]] = []
    for number in sorted(set(numbers)):
        if spans and number == spans[-1][-1] + 1:
            spans[-1][1:] = [number]
        else:
            spans.append([number])
    words = ["-".join(map(str, span)) for span in spans[:MOST_SPANS]]
    hidden = sum(span[-1] - span[0] + 1 for span in spans[MOST_SPANS:])
    several = len(spans) > 1 or any(len(span) > 1 for span in spans)
    return f"{what}{'s' if several else ''} {', '.join(words)}{f' and {hidden} more' if hidden else ''}"


def all_of(count: int, what: str, do: str) -> str:
    """ "all 2 members run", "its only member runs". do: the verb of several."""
    return f"its only {what} {do}s" if count == 1 else f"all {count} {what}s {do}"
