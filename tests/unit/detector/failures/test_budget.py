"""Many texts at once: those that are alike are judged once, and of those that differ only so much as the budget has."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path

import pytest

from tests.support.rank_texts import Counting, different, watchdog
from unicron_detector.failures.classify import Classifier
from unicron_detector.failures.text_budget import (
    _WHO_AND_WHEN,
    END_JUDGED,
    NOT_JUDGED,
    OF_A_JOB,
    OF_ALL_JOBS,
    TAIL,
    Budget,
    alike,
)


def test_lines_of_all_ranks_that_are_alike_are_judged_once():
    classifier, budget = Counting(), Budget()
    bound = classifier.within(budget, "1")
    verdicts = {bound.exit(-6, watchdog(rank)) for rank in range(16_384)}
    assert len(classifier.judged) == 1
    (verdict,) = verdicts
    assert verdict.cause == "nccl_timeout" and "not judged" not in verdict.reason


def test_of_many_different_texts_a_part_is_judged_and_the_record_says_which():
    classifier, budget = Counting(), Budget()
    bound = classifier.within(budget, "1")
    reasons = [bound.exit(1, text).reason for text in different(1024)]
    assert sum(map(len, classifier.judged)) <= sum(OF_A_JOB)
    assert NOT_JUDGED not in reasons[0] and END_JUDGED not in reasons[0]
    assert sum(END_JUDGED in reason for reason in reasons) == sum(len(text) == TAIL for text in classifier.judged) > 50
    assert sum(NOT_JUDGED in reason for reason in reasons) == 1024 - len(classifier.judged) > 900
    assert bound.exit(1, next(different(7))).rule == "exit-python"


def test_the_end_of_a_text_still_says_why():
    bound = Counting().within(Budget((0, 1000), (0, 1000)), "1")
    verdict = bound.exit(1, "x" * 3000 + " Connection reset by peer")
    assert verdict.cause == "connection_reset" and END_JUDGED in verdict.reason


def test_another_jobs_failure_in_the_same_turn_is_judged_by_its_words():
    classifier, budget = Counting(), Budget()
    for text in different(1024):
        classifier.within(budget, "1").exit(1, text)
    other = classifier.within(budget, "2").exit(1, "RuntimeError: CUDA error: an illegal memory access was encountered")
    assert other.cause == "illegal_memory_access" and "not judged" not in other.reason


def test_no_number_of_jobs_makes_more_than_the_budget_of_all():
    classifier, budget = Counting(), Budget()
    for number, text in enumerate(different(2048)):
        classifier.within(budget, str(number % 64)).exit(1, text)
    assert sum(map(len, classifier.judged)) <= sum(OF_ALL_JOBS)


def test_the_next_turn_has_the_whole_budget_again():
    classifier, budget = Counting(), Budget()
    texts = list(different(1025))
    for text in texts[:1024]:
        classifier.within(budget, "1").exit(1, text)
    assert NOT_JUDGED in classifier.within(budget, "1").exit(1, texts[-1]).reason
    budget.renew()
    assert "judged" not in classifier.within(budget, "1").exit(1, texts[-1]).reason


def test_a_text_whose_end_alone_was_judged_is_read_whole_when_it_comes_again():
    classifier, budget = Counting(), Budget((0, 1000), (0, 1000))
    text = "RuntimeError: Connection refused" + " x" * 1000
    assert END_JUDGED in classifier.within(budget, "1").exit(1, text).reason
    assert classifier.exit(1, text).cause == "connection_refused"


def test_words_of_ranks_keep_no_kernels_words_from_being_heard():
    classifier, budget = Counting(), Budget()
    for text in different(1024):
        classifier.within(budget, "1").exit(1, text)
    line = "NVRM: Xid (PCI:0000:07:00): 79, pid=1, GPU has fallen off the bus."
    assert classifier.within(budget, "1").text(line, "kernel").rule == "xid-gpu-lost"


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (watchdog(3), watchdog(12_345)),
        ("peer 10.0.0.7:29500 closed", "peer 10.1.22.7:40112 closed"),
        ("connect to [node17]:29500 failed", "connect to [node4]:31200 failed"),
        ("connect to node17.site:29500 failed", "connect to node4.site:31200 failed"),
        ("[::ffff:10.0.0.5]:43210 reset", "[::ffff:10.0.9.25]:1234 reset"),
        ("node3:4711:4800 [0] NCCL WARN x", "node14:1:2 [0] NCCL WARN x"),
        ("fault at 0x7f00deadbeef", "fault at 0x7fffdeadbe00"),
        ("2026-11-26 04:02:24,123 ERROR x", "2026-11-25 23:59:59,999 ERROR x"),
        ("killed (pid 4711)", "killed (pid 12)"),
    ],
)
def test_who_and_when_make_no_difference(one, other):
    assert alike(one) == alike(other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("NVRM: Xid (PCI:0000:07:00): 79", "NVRM: Xid (PCI:0000:07:00): 48"),
        ("[Errno 28] No space", "[Errno 5] No space"),
        ("errno: 107", "errno: 108"),
        ("exit code 137", "exit code 1"),
        ("exited with status 2", "exited with status 3"),
        ("cuInit error 802", "cuInit error 999"),
        ("HTTP Error 503", "HTTP Error 404"),
        ("got signal: 15", "got signal: 11"),
        ("rc = -28", "rc = -5"),
        ("fault 0x1", "fault 0x0"),
        ("curl: (28) x", "curl: (6) x"),
    ],
)
def test_numbers_that_say_what_happened_stay(one, other):
    assert alike(one) != alike(other)


def test_no_known_text_gets_another_verdict_for_other_ranks_addresses_and_times():
    classifier, rng, changed = Classifier(), random.Random(1), 0

    def other(hit: re.Match[str]) -> str:
        kept = len(hit[hit.lastindex]) if hit.lastindex else 0
        return hit[0][:kept] + re.sub(r"\d", lambda _: str(rng.randrange(1, 10)), hit[0][kept:])

    for line in (Path(__file__).parents[3] / "data" / "errors.jsonl").read_text().splitlines():
        entry = json.loads(line)
        text = entry["text"] if alike(entry["text"]) == entry["text"] else _WHO_AND_WHEN.sub(other, entry["text"])
        if entry["channel"] != "kernel" and text != entry["text"]:
            changed += 1
            was = classifier.text(entry["text"], entry["channel"])
            now = Classifier(classifier.table).text(text, entry["channel"])
            assert (was.cause, was.rule) == (now.cause, now.rule), text
    assert changed > 100


def test_a_reason_names_no_other_rank():
    classifier = Classifier()
    first = classifier.exit(1, "peer rank 3 died at 10.0.0.3:29500, node 7 lost")
    second = classifier.exit(1, "peer rank 8 died at 10.0.0.8:29500, node 7 lost")
    assert first == second and "3" not in second.reason
