"""The table itself: every row of the paper, sources, no rule that is never reached, wrong rules refused."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.support.depth import DEEP
from unicron_detector.failures.classify import default_classifier
from unicron_detector.failures.severity import (
    SCOPES,
    Severity,
    SeverityTableError,
    default_table,
    fold_case,
    load_table,
    parse_rule,
)

TABLE = default_table()

# docs/design/paper.md, sections 1 (shares) and 3 (methods): row -> severity.
PAPER_ROWS = {
    "NCCL timeout": 3,
    "link flapping": 3,
    "task hang": 2,
    "CUDA errors": 2,
    "NVLink errors": 1,
    "GPU driver errors": 1,
    "connection refused": 3,
    "connection reset": 3,
    "other network errors": 3,
    "illegal memory access": 2,
    "ECC errors": 1,
    "invalid DMA mapping": 1,
    "others": 2,
    "lost connection": 1,
    "exited abnormally": 2,
    "other software error": 2,
}


@pytest.mark.parametrize("row", PAPER_ROWS)
def test_every_row_of_the_paper_has_its_severity(row):
    causes = [cause for cause in TABLE.causes.values() if cause.paper == row]
    assert len(causes) == 1
    assert int(causes[0].severity) == PAPER_ROWS[row]


def test_no_cause_claims_a_row_that_the_paper_does_not_have():
    assert {cause.paper for cause in TABLE.causes.values() if cause.paper} == set(PAPER_ROWS)


def test_every_rule_names_its_source_and_every_cause_its_scope():
    assert [rule.id for rule in TABLE.rules if not rule.source] == []
    assert all(cause.scope in SCOPES for cause in TABLE.causes.values())


def test_only_hardware_is_isolated_at_once():
    assert {cause.scope for cause in TABLE.causes.values() if cause.severity is Severity.SEV1} == {"hardware"}
    for rule in TABLE.rules:
        if (rule.severity or TABLE.causes[rule.cause].severity) is Severity.SEV1:
            assert TABLE.causes[rule.cause].scope == "hardware"


def test_no_code_stands_in_two_rules_unless_a_pattern_tells_them_apart():
    for kind in ("xid", "exit"):
        plain = [code for rule in TABLE.of_kind(kind) if not rule.pattern for code in rule.codes]
        assert len(plain) == len(set(plain))
    for kind in ("signal", "slurm"):
        names = [name for rule in TABLE.of_kind(kind) for name in rule.names]
        assert len(names) == len(set(names))


def test_the_default_is_a_restart():
    verdict = default_classifier().text("something never seen before")
    assert (verdict.severity, verdict.action, verdict.rule) == (Severity.SEV2, "restart", "default")
    assert "no rule knows" in verdict.reason


@pytest.mark.parametrize(
    ("raw", "says"),
    [
        ({"pattern": "x", "cause": "nonsense"}, "unknown cause"),
        ({"pattern": "(", "cause": "others"}, "not a regular expression"),
        ({"pattern": "a*", "cause": "others"}, "matches an empty line"),
        ({"cause": "others"}, "needs a pattern"),
        ({"kind": "xid", "cause": "others"}, "needs codes"),
        ({"kind": "signal", "cause": "others"}, "needs names"),
        ({"kind": "smell", "cause": "others"}, "kind must be"),
        ({"pattern": "x", "cause": "others", "severity": 4}, "1, 2 or 3"),
        ({"pattern": "x", "cause": "others", "severity": True}, "1, 2 or 3"),
        ({"pattern": "x", "cause": "others", "colour": "red"}, "unknown key"),
        ({"pattern": 5, "cause": "others"}, "must be text"),
        ({"kind": "xid", "codes": ["a"], "cause": "others"}, "list of int"),
        ({"pattern": "x", "cause": "others", "action": "explode"}, "may only be"),
    ],
)
def test_wrong_rules_are_refused_in_one_line(raw, says):
    with pytest.raises(SeverityTableError, match=says) as caught:
        parse_rule(raw, TABLE.causes)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        'default = "nothing"',
        '[[cause]]\nname = "a"\nseverity = 1\n[[cause]]\nname = "a"\nseverity = 2',
        '[[cause]]\nname = "Bad Name"\nseverity = 1',
        '[[cause]]\nname = "a"\nseverity = 1\nscope = "moon"',
        "[[cause",
    ],
)
def test_wrong_tables_are_refused(tmp_path, text):
    path = tmp_path / "table.toml"
    path.write_text(text)
    with pytest.raises(SeverityTableError):
        load_table(path)


def test_the_admins_rules_go_first_and_may_bring_causes():
    classifier = default_classifier().load(
        {
            "severity": {
                "cause": [{"name": "coffee", "severity": 1, "scope": "hardware"}],
                "rule": [
                    {"pattern": "Connection refused by coffee machine", "cause": "coffee"},
                    {"kind": "xid", "codes": [79], "cause": "cuda_error"},
                ],
            }
        }
    )
    assert classifier.text("Connection refused by coffee machine").severity is Severity.SEV1
    assert classifier.text("Connection refused by coffee machine").rule == "admin-1"
    assert classifier.text("Connection refused").cause == "connection_refused"
    assert classifier.xid(79).cause == "cuda_error"
    assert default_classifier().xid(79).cause == "gpu_lost"


def test_a_rule_of_the_same_id_replaces_ours():
    rule = {"id": "refused", "pattern": "will never be seen", "cause": "others"}
    assert default_classifier().load({"severity": {"rule": [rule]}}).text("Connection refused").rule == "default"


@pytest.mark.parametrize("extra", [{"severity": []}, {"severity": {"rule": {"a": 1}}}, {"severity": {"rule": ["x"]}}])
def test_a_misshapen_section_is_refused(extra):
    with pytest.raises(SeverityTableError):
        default_classifier().load(extra)


def test_the_causes_are_what_traces_may_name():
    corpus = Path(__file__).parents[3] / "data" / "errors.jsonl"
    assert {json.loads(line)["cause"] for line in corpus.read_text().splitlines()} <= set(TABLE.causes)


def test_folding_is_the_same_as_ignoring_case_only_faster():
    texts = [json.loads(line)["text"] for line in (Path(__file__).parents[3] / "data" / "errors.jsonl").open()][
        :: 4 if DEEP else 16
    ]
    texts += [text.upper() for text in texts[::3]] + ["İSTANBUL connection refused", "Straße CUDA Error"]
    for rule in TABLE.of_kind("text"):
        slow = re.compile(rule.pattern, re.IGNORECASE)
        for text in texts:
            hit, expected = rule.regex.search(fold_case(text)), slow.search(text)
            assert (hit and hit.span()) == (expected and expected.span()), (rule.id, text)


def test_folding_keeps_positions():
    for text in ["", "ABC", "İÄß", "Ω\u0130X" * 10]:
        assert len(fold_case(text)) == len(text)


def test_unusual_escapes_of_an_admins_pattern_still_ignore_case():
    rule = parse_rule({"pattern": r"\x41larm \N{LATIN CAPITAL LETTER B}ig", "cause": "others"}, TABLE.causes)
    assert rule.regex.search(fold_case("ALARM BIG"))
