"""No text of a process keeps the judge for long: what it costs is compared with a harmless one in the same run."""

from __future__ import annotations

import random
import re
import time
from collections.abc import Callable, Iterator

import pytest

from tests.support.depth import cases
from unicron_detector.failures.classify import MAX_TEXT, Classifier
from unicron_detector.failures.labels import label
from unicron_detector.failures.prefilter import LONGEST_REPEAT, Alternative, bound_repeats
from unicron_detector.failures.severity import default_table, parse_rule
from unicron_detector.failures.statements import LONGEST_LINE, LONGEST_TEXT, head_and_tail, statements

TABLE = default_table()
TEXT_RULES = TABLE.of_kind("text")
HARMLESS = "the quick brown fox jumps over lazy tensor 12 "
MIXTURES = [*"aA0 /_.:-([^~'\"\té", "a1_", "a.", "a::", "/.so("]
RATIO = 50  # to a harmless text of the same length, of which most patterns see nothing at all


def seconds(work: Callable[[], object], tries: int = 1) -> float:
    """The processor time of the quickest of some tries."""
    took = []
    for _ in range(tries):
        start = time.process_time()
        work()
        took.append(time.process_time() - start)
    return min(took)


def filled(piece: str, length: int, end: str = "") -> str:
    return (piece * (length // len(piece) + 1))[: length - len(end)] + end


def own_words(pattern: str) -> list[str]:
    return list(dict.fromkeys(re.findall(r"[a-z0-9_/]{2,}(?: [a-z0-9_/]+)*", pattern)))


def pieces(pattern: str) -> Iterator[str]:
    """Yield texts with which a pattern may begin again and again, with and without spaces and more of its words."""
    words = own_words(pattern)
    for word in words:
        yield from (word, f"{word} ", f"{word}_", f"{word}: ", f"{word}1", f"{words[0]}{word}", f"{words[0]} {word} ")
        yield word[:-1]
    yield from MIXTURES


def judged(text: str) -> object:
    fresh = Classifier(TABLE)  # it remembers no text
    return fresh.text(text, "stderr"), fresh.exit(1, text)


def longest(line: str) -> str:
    """Return as many lines as one judged statement has at most."""
    return "\n".join(line for _ in range(MAX_TEXT // len(line)))


def assert_below_bound(name: str, make: Callable[[int], Callable[[], object]], harmless: float, longest: int) -> float:
    """Goes from short texts to the longest, so that a pattern that takes too long shows early."""
    took, length = 0.0, 125
    while True:
        took = seconds(make(length))
        if took > RATIO * harmless:
            took = seconds(make(length), 3)
        assert took <= RATIO * harmless, f"{name}: {length} characters cost {took / harmless:.0f} times a harmless text"
        if length >= longest:
            return took
        length = min(longest, 4 * length)


def test_no_alternative_of_a_rule_takes_long_for_repetitions_of_its_own_words():
    harmless = seconds(lambda: judged(filled(HARMLESS, LONGEST_LINE)), 5)
    worst: dict[str, tuple[float, str]] = {}
    for rule in TEXT_RULES:
        for part in rule.alternatives:
            tried = list(dict.fromkeys(pieces(part.pattern)))
            for piece in random.Random(part.pattern).sample(tried, cases(len(tried))):

                def search(length: int, part: Alternative = part, piece: str = piece) -> Callable[[], object]:
                    text = filled(piece, length)
                    return lambda: part.regex.search(text)

                took = assert_below_bound(f"{rule.id}, {piece!r}", search, harmless, LONGEST_LINE)
                worst[rule.id] = max(worst.get(rule.id, (0.0, "")), (took, piece))
    harmless = seconds(lambda: judged(longest(filled(HARMLESS, LONGEST_LINE))), 5)
    for name, (_, piece) in worst.items():  # and the whole judgement, of the longest text

        def judge(length: int, piece: str = piece) -> Callable[[], object]:
            return lambda: judged(longest(filled(piece, length)))

        assert_below_bound(f"{name}, {piece!r}", judge, harmless, LONGEST_LINE)


@pytest.mark.parametrize(
    "begin", ["", "RuntimeError: ", "NVRM: Xid (", '  File "', "cupy", "[", "Exception in thread '"]
)
def test_no_mixture_takes_long(begin):
    """The statements of a text are found and judged in time that grows with the text alone, as those of one line."""
    harmless = seconds(lambda: judged(filled(HARMLESS, LONGEST_TEXT)), 3)
    lines = seconds(lambda: judged("\n".join([filled(HARMLESS, 120)] * (LONGEST_TEXT // 121))), 3)
    tried = [*MIXTURES, begin or "x", "btl_", "nfs4_", "error: btl_"]
    for piece in random.Random(begin).sample(tried, cases(len(tried), 8)):
        text = begin + filled(piece, LONGEST_TEXT)
        for each, bound in ((text, harmless), ("\n".join([text[:120]] * (LONGEST_TEXT // 121)), lines)):
            took = seconds(lambda each=each: judged(each), 1)
            if took > RATIO * bound:
                took = seconds(lambda each=each: judged(each), 3)
            assert took <= RATIO * bound, f"{begin!r} and {piece!r}: {took / bound:.0f} times a harmless text"


def test_a_long_rank_line_costs_no_more_than_its_ends():
    text = "btl_" * 5000
    harmless = seconds(lambda: judged(filled(HARMLESS, len(text))), 5)
    assert seconds(lambda: judged(text), 3) <= RATIO * harmless


def test_no_repetition_of_a_pattern_is_without_end():
    for rule in TEXT_RULES:
        for part in rule.alternatives:
            bare = re.sub(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]", "x", part.pattern)
            assert not re.search(r"[*+]|\{\d+,\}", bare), (rule.id, part.pattern)


def test_an_admins_pattern_gets_ends_too():
    rule = parse_rule({"pattern": r"Lost\w+\s*(a|b)+ [+*]{2,}\+x{3,5}+y*?", "cause": "others"}, TABLE.causes)
    most = LONGEST_REPEAT
    wanted = rf"lost\w{{1,{most}}}\s{{0,{most}}}(a|b){{1,{most}}} [+*]{{2,{most}}}\+x{{3,5}}+y{{0,{most}}}?"
    assert rule.regex.pattern == wanted == bound_repeats(wanted)


def test_of_a_long_text_the_head_and_the_tail_of_each_line_are_kept():
    text = f"head{'x' * 9999}tail\nshort\n{'y' * 100_000}"
    kept = head_and_tail(text, MAX_TEXT)
    assert kept.startswith("head") and "tail\nshort\n" in kept
    assert (
        max(map(len, kept.split("\n"))) <= LONGEST_LINE and len(head_and_tail("z\n" * 99_999, MAX_TEXT)) <= MAX_TEXT + 1
    )
    assert head_and_tail("as it is\n", MAX_TEXT) == "as it is\n"
    said = statements(f"RuntimeError: {'x' * 50_000} Connection refused")
    assert "Connection refused" in said[-1].text and label("ERROR: x") is not None
