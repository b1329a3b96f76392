"""Finds the rules that can match a text at all, by words that each pattern needs.

A pattern is taken apart into the alternatives of its outermost ``|``, and each alternative into words of which a
matching text must contain one. Pieces of four bytes of these words are the keys of an index, so only alternatives whose
word is in the text are tried. An alternative without such a word is always tried; the verdict stays the same.
Standard library only: ranks import it.
"""

from __future__ import annotations

import functools
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain

PIECE = 4  # bytes of a key of the index
SHORTEST = 3  # letters of a word
LONGEST_REPEAT = 120  # times that a piece with no end of its own may repeat

_TOKEN = re.compile(  # first letters that stand for themselves, as many as there are: a start reads 64,000 of them
    r"[\w ]{2,}(?![*+?{])|\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|\(\?(?:[:!=]|<[!=])|\(\?|[()|^$.]|[*+?]|\{\d*,?\d*\}|.",
    re.DOTALL,
)
_FROM_NONE = re.compile(r"\{0*(?:,\d*)?\}")
_QUANTIFIER = re.compile(r"[*+?]|\{\d*,?\d*\}")
_WITHOUT_END = re.compile(r"\{(\d+),\}")
_LOOKS_AROUND = ("(?!", "(?=", "(?<!", "(?<=")
_SPECIAL = frozenset("()|^$.*+?")
Words = tuple[str, ...]
"""The text must contain one of these."""


@dataclass(frozen=True)
class Alternative:
    """A part of a rule's pattern that matches by itself."""

    place: int  # its position among the parts
    pattern: str
    flags: int
    required: tuple[Words, ...]
    """Everything that it matches contains one word of each of these."""

    @functools.cached_property
    def regex(self) -> re.Pattern[str]:
        return re.compile(self.pattern, self.flags)


def bound_repeats(pattern: str) -> str:
    """Return the pattern with an end to every repetition, so that a search takes time in proportion to any text.

    A pattern such as ``a\\w+b`` reads a text of many a's to its end from each of them.
    """
    out: list[str] = []
    for token in _TOKEN.findall(pattern):
        if token in ("*", "+"):
            possessive = bool(out) and _QUANTIFIER.fullmatch(out[-1]) is not None
            token = token if possessive else f"{{{int(token == '+')},{LONGEST_REPEAT}}}"
        elif token[0] == "{" and (found := _WITHOUT_END.fullmatch(token)):
            token = f"{{{found.group(1)},{max(LONGEST_REPEAT, int(found.group(1)))}}}"
        out.append(token)
    return "".join(out)


def alternatives(pattern: str, flags: int) -> tuple[Alternative, ...]:
    """Return the parts of a pattern, in its order. A pattern with flags or special groups stays whole and requires
    nothing."""
    tokens = _TOKEN.findall(pattern)
    if flags or "(?" in tokens:
        return (Alternative(0, pattern, flags, ()),)
    parts = enumerate(_read(tokens, 0)[0])
    return tuple(Alternative(place, "".join(tokens[a:b]), flags, required) for place, (a, b, required) in parts)


def _read(tokens: Sequence[str], at: int) -> tuple[list[tuple[int, int, tuple[Words, ...]]], int]:
    """Return the alternatives up to the end of a group or of the pattern, each with its start, its end and what it
    requires; and the position of that end."""
    parts: list[tuple[int, int, tuple[Words, ...]]] = []
    start, run = at, ""
    required: list[Words] = []
    while True:
        token = tokens[at] if at < len(tokens) else ")"
        letter = _literal(token)
        if letter is not None and not _may_be_absent(tokens, at + 1):
            run += letter
        else:
            if len(run) >= SHORTEST:
                required.append((run,))
            run = ""
        if token[0] == "(":
            inner, at = _read(tokens, at + 1)
            if token not in _LOOKS_AROUND and not _may_be_absent(tokens, at + 1):
                required += _of_one([each for _, _, each in inner])
        elif token in ("|", ")"):
            parts.append((start, at, tuple(required)))
            if token == ")":
                return parts, at
            start, required = at + 1, []
        at += 1


def _of_one(branches: Sequence[tuple[Words, ...]]) -> list[Words]:
    if not all(branches):
        return []
    longest = [max(each, key=lambda words: min(map(len, words))) for each in branches]
    return [tuple(dict.fromkeys(word for words in longest for word in words))]


def _literal(token: str) -> str | None:
    """Return the letters that a token stands for; None if it stands for one of several, for none, or for a line's
    end."""
    if token[0] == "\\" and len(token) == 2:
        return None if token[1].isalnum() else token[1]
    if len(token) > 1:
        return None if token[0] in "[({" else token
    return token if token not in _SPECIAL and token.isprintable() else None


def _may_be_absent(tokens: Sequence[str], at: int) -> bool:
    """Whether the token at `at` lets the piece before it be left out."""
    return at < len(tokens) and (tokens[at] in ("?", "*") or _FROM_NONE.match(tokens[at]) is not None)


_Entry = tuple[str, list[tuple[int, Alternative]]]  # a word, and the alternatives that need it


class Prefilter:
    """The index over the alternatives of many rules, which are known by their numbers."""

    def __init__(self, rules: Sequence[Sequence[Alternative]]) -> None:
        self._always: list[tuple[int, Alternative]] = []
        self._short: list[_Entry] = []
        self._by_piece: dict[int, list[_Entry]] = defaultdict(list)
        numbered = [(number, part) for number, parts in enumerate(rules) for part in parts]
        usual = Counter(word for _, part in numbered for words in part.required for word in words)
        needed: dict[str, list[tuple[int, Alternative]]] = defaultdict(list)
        for owner in numbered:
            for word in min(
                owner[1].required, key=lambda words: sum(usual[w] / len(w) ** 2 for w in words), default=()
            ):
                needed[word].append(owner)
            if not owner[1].required:
                self._always.append(owner)
        common = Counter(piece for word in needed for piece in _pieces(word))
        for entry in needed.items():
            pieces = _pieces(entry[0])
            home = self._by_piece[min(pieces, key=lambda piece: (common[piece], piece))] if pieces else self._short
            home.append(entry)

    def candidates(self, text: str) -> dict[int, list[Alternative]]:
        """Return, by rule, the alternatives that may match the text, in any order."""
        found: dict[int, list[Alternative]] = defaultdict(list)
        for number, part in self._always:
            found[number].append(part)
        entries = [self._short]
        entries += [self._by_piece[piece] for piece in self._by_piece.keys() & _pieces(text)]
        for word, owners in chain.from_iterable(entries):
            if word in text:
                for number, part in owners:
                    found[number].append(part)
        return found


def _pieces(text: str) -> set[int]:
    """Return all pieces of a text, four bytes as a number: numbers are made faster than strings."""
    data = memoryview(text.encode(errors="surrogatepass"))
    whole = [data[first : len(data) - (len(data) - first) % PIECE] for first in range(min(PIECE, len(data)))]
    return set().union(*(part.cast("I") for part in whole))


def search(parts: Iterable[Alternative], text: str) -> re.Match[str] | None:
    """Return a pattern's match by its parts: the one that begins first, of several there that of the first part."""
    best: tuple[int, int, re.Match[str]] | None = None
    for part in parts:
        hit = part.regex.search(text)
        if hit is not None and (best is None or (hit.start(), part.place) < best[:2]):
            best = hit.start(), part.place, hit
    return best[2] if best is not None else None
