"""The prefilter leaves out only what cannot match: every pattern finds the same with it and without."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.depth import cases
from unicron_detector.failures import prefilter
from unicron_detector.failures.prefilter import Prefilter, alternatives, search
from unicron_detector.failures.severity import default_table, fold_case, load_table

LINES = [
    line
    for entry in (Path(__file__).parents[3] / "data" / "errors.jsonl").read_text().splitlines()
    for line in json.loads(entry)["text"].splitlines()
]
TABLE = default_table()


def assert_finds_the_same(text: str) -> None:
    low = fold_case(text)
    found = TABLE.candidates(low)
    for number, rule in enumerate(TABLE.of_kind("text")):
        whole, parts = rule.regex.search(low), search(found.get(number, ()), low)
        assert (whole and whole.span()) == (parts and parts.span()), (rule.id, text)


@pytest.mark.parametrize("part", range(cases(16)))
def test_every_rule_finds_the_same_in_the_corpus(part):
    for line in LINES[part::16]:
        assert_finds_the_same(line)


@pytest.mark.parametrize("seed", range(cases(8)))
def test_every_rule_finds_the_same_in_mutated_texts(seed):
    rng = random.Random(seed)
    for _ in range(40):
        one, other, third = rng.sample(LINES, 3)
        cut, other_cut = rng.randrange(len(one) + 1), rng.randrange(len(other) + 1)
        assert_finds_the_same(one[:cut] + other[other_cut:])
        assert_finds_the_same(f"{other[:other_cut]}\n{third}\n{one[cut:]}".swapcase())
        words = f"{one} {other} {third}".split()
        assert_finds_the_same(" ".join(rng.sample(words, len(words))))


PIECES = st.sampled_from(["c d", *r"abc abcd dab error a b . \w \b [ab] [^a] []|(] \. \| ^ $ {".split()])
PATTERNS = st.recursive(
    PIECES,
    lambda inner: st.one_of(
        st.lists(inner, min_size=1, max_size=4).map("".join),
        st.lists(inner, min_size=2, max_size=3).map("|".join),
        st.tuples(st.sampled_from(["(", "(?:", "(?=", "(?!"]), inner).map(lambda each: f"{each[0]}{each[1]})"),
        st.tuples(inner, st.sampled_from(["?", "*", "+", "{2}", "{0,2}", "{,2}", "{1,2}?", "*?"])).map(
            lambda each: f"(?:{each[0]}){each[1]}"
        ),
        st.tuples(st.sampled_from("abcd"), st.sampled_from(["?", "*", "+", "{2}", "{0,2}", "{0}", "??"])).map("".join),
    ),
    max_leaves=12,
)


@settings(max_examples=cases(500), deadline=None)
@given(
    PATTERNS,
    st.lists(st.sampled_from(["abc", "abcd", "dab", "c d", "error", "a", "b", "d", ".", "|", "{"]), max_size=8),
)
def test_any_pattern_finds_the_same(pattern, pieces):
    text = "".join(pieces)
    parts = alternatives(pattern, 0)
    whole = re.compile(pattern).search(text)
    found = search(Prefilter([parts]).candidates(text).get(0, ()), text)
    assert (whole and whole.span()) == (found and found.span())


@pytest.mark.parametrize(
    ("pattern", "required"),
    [
        ("connection (was )?reset", [(("connection ",), ("reset",))]),
        ("(failed|unable) to open|no such file", [(("failed", "unable"), (" to open",)), (("no such file",),)]),
        ("colou?r", [(("colo",),)]),
        ("ab{0,3}c", [()]),
        ("(?!never)always", [(("always",),)]),
        ("(?i)any case", [()]),
    ],
)
def test_what_a_pattern_requires(pattern, required):
    assert [part.required for part in alternatives(pattern, 0)] == required


def test_patterns_of_the_shipped_table_are_right_and_nearly_all_require_words():
    assert load_table() == load_table(tested=True)
    parts = [part for rule in TABLE.of_kind("text") for part in rule.alternatives]
    assert len(parts) > 1000 and sum(not part.required for part in parts) <= 3


def test_few_patterns_are_tried_on_what_no_rule_knows():
    text = "the quick brown fox jumps over the lazy tensor " * 300
    assert sum(map(len, TABLE.candidates(text).values())) < 40


def test_letters_that_stand_for_themselves_are_read_together() -> None:
    """Defect: each start of unicrond read the table's 64,000 letters one by one, for a sixth of a second."""
    patterns = [rule.pattern for rule in default_table().of_kind("text")]
    assert sum(len(prefilter._TOKEN.findall(pattern)) for pattern in patterns) < sum(map(len, patterns)) / 2
    assert all("".join(prefilter._TOKEN.findall(pattern)) == pattern for pattern in patterns)


@pytest.mark.parametrize(
    "pattern", ["abc?d", "ab{2}c", "ab{0,1}c", "abc*", "abc+", "a b|cd", "a{b", "[ab]cd", r"\ab c"]
)
def test_letters_read_together_require_what_single_ones_do(pattern: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = [(part.pattern, part.required) for part in prefilter.alternatives(pattern, 0)]
    monkeypatch.setattr(prefilter, "_TOKEN", re.compile(prefilter._TOKEN.pattern.partition("|")[2], re.DOTALL))
    assert [(part.pattern, part.required) for part in prefilter.alternatives(pattern, 0)] == found
    assert prefilter.bound_repeats(pattern) == pattern.replace("*", "{0,120}").replace("+", "{1,120}")
