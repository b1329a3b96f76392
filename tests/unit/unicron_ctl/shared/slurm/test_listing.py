"""Reading squeue: whatever users write, every element comes back as itself."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unicron_ctl.shared.slurm import squeue
from unicron_ctl.shared.slurm.slurm_client import ElementInfo

S = "\x1f"
FACTS = ("7", "2", "9", "RUNNING", "ann", "1000", "1970-01-02T00:00:01", "1-00:00:00", "17", "N/A", "main", "(null)")
KEY = ("7", "2")


def _facts(*more: str, **changes: str) -> str:
    names = ("job", "index", "id", "state", "user", "uid", "submitted", "limit", "priority", "starts", "partition")
    values = dict(zip((*names, "reservation"), FACTS, strict=True)) | changes
    return S.join((*values.values(), *(more or ("n3", "(null)", ""))))


def _row(columns: tuple[tuple[str, int], ...] = squeue.ALL_COLUMNS, **texts: str) -> bytes:
    """As squeue of 22.05 prints it: by bytes, cut and filled up."""
    texts = {"ArrayJobID": "7", "ArrayTaskID": "2", "RestartCnt": "1", "exit_code": "0", "Reason": "None"} | texts
    return (
        b"".join(texts.get(name, "(null)").encode()[:width].ljust(width) + b"\x1f" for name, width in columns) + b"\n"
    )


def _read(facts: str, rows: bytes) -> list[ElementInfo]:
    found = squeue.parse_columns(rows, squeue.ALL_COLUMNS)
    assert found is not None
    return [squeue.complete(fact, found[fact.key]) for fact in squeue.parse_facts(facts)]


def test_an_element_with_all_that_slurm_tells() -> None:
    rows = _row(**{"tres-per-node": "gres:gpu:a100:8", "Feature": "a100&ib", "Name": "my job", "Account": "lab"})
    (info,) = _read(_facts("n3", "n[4-5]", "n[1-2],m7"), rows)
    assert info == ElementInfo(
        job="7",
        element=2,
        slurm_id="9",
        state="RUNNING",
        node="n3",
        reason="",
        name="my job",
        user="ann",
        comment="",
        restarts=1,
        uid=1000,
        submitted=86401.0,
        account="lab",
        partition="main",
        features="a100&ib",
        gres="gpu:a100:8",
        excluded_nodes=frozenset({"n1", "n2", "m7"}),
        time_limit=86400.0,
        priority=17,
        planned_nodes=frozenset({"n4", "n5"}),
        array=True,
    )


def test_a_plain_job_is_element_0_and_no_array() -> None:
    (fact,) = squeue.parse_facts(_facts(index="N/A", state="PENDING"))
    assert (fact.info.element, fact.is_array, fact.key) == (0, False, ("7", "N/A"))


def test_an_element_waits_after_an_expedited_requeue() -> None:
    assert squeue.parse_facts(_facts(state="EXPEDITING"))[0].info.state == "PENDING"


_HOSTILE = (
    "x\n" + _facts(user="eve"),
    S.join("abcdefgh"),
    S * 20,
    "\n".join(["7" + " " * 10 + S] * 4),
    _row(Name="forged").decode(),
    "\x00\x1b[2J",
    "é" * 200,
)


@pytest.mark.parametrize("text", _HOSTILE)
def test_no_text_passes_for_another_element_or_hides_one(text: str) -> None:
    for column in ("Name", "Comment", "Account", "admin_comment", "Feature", "QOS"):
        rows = _row(**{column: text}) + _row(ArrayTaskID="3", Name="honest")
        found = _read(_facts() + "\n" + _facts(index="3", id="10") + "\n", rows)
        assert [(e.job, e.element, e.user, e.restarts) for e in found] == [("7", 2, "ann", 1), ("7", 3, "ann", 1)]
        assert found[1].name == "honest"


@given(name=st.text(max_size=80), comment=st.text(max_size=80))
def test_whatever_users_write_is_read_as_far_as_its_column_goes(name: str, comment: str) -> None:
    (info,) = _read(_facts(), _row(Name=name, Comment=comment))
    assert info.name == _shown(name) and (info.comment == _shown(comment) or not squeue.value_or_empty(comment))


def _shown(text: str) -> str:
    """What is to come back: the text, or what fits into 64 bytes of it, and an ellipsis."""
    data = text.encode()[:64]
    full = len(data) == 64 and data[-1:] != b" "
    return data.decode(errors="ignore").rstrip(" ") + ("…" if full else "")


def test_a_line_that_cannot_be_read_spoils_only_itself() -> None:
    bad = [_facts(uid="-1"), _facts(job="7x"), _facts(submitted="never"), _facts(index="?"), _facts() + S, "oops", ""]
    bad += [_facts(job="²"), _facts(uid="²"), _facts(index="²")]  # a digit, but no number
    for line in bad:
        assert [f.info.slurm_id for f in squeue.parse_facts(f"{_facts()}\n{line}\n{_facts(id='11')}")] == ["9", "11"]


@pytest.mark.parametrize("wrong", [b"x", b"\n", b" " * 20])
def test_columns_of_another_width_are_seen(wrong: bytes) -> None:
    assert squeue.parse_columns(_row() + wrong, squeue.ALL_COLUMNS) is None
    assert squeue.parse_columns(wrong + _row()[: -len(wrong)], squeue.ALL_COLUMNS) is None
    assert squeue.parse_columns(_row()[:-1] + b" " + _row()[:-1] + b" ", squeue.ALL_COLUMNS) is None
    assert squeue.parse_columns(b"", squeue.ALL_COLUMNS) == {}


def test_how_an_element_ended_is_read_from_its_wait_status() -> None:
    ended = {"35072": "137:0", "9": "0:9", "768": "3:0", "0": "", "0:125": "0:125", "N/A": ""}
    for status, expected in ended.items():
        assert _read(_facts(state="FAILED"), _row(exit_code=status))[0].exit_code == expected


def test_times_and_limits() -> None:
    assert squeue.parse_time("1970-01-02T00:00:01") == 86401.0
    assert squeue.parse_time("None") is None and squeue.parse_time("Unknown") is None and squeue.parse_time("") is None
    limits = {"5": 300.0, "30:00": 1800.0, "2:00:00": 7200.0, "1-02:30:00": 95400.0, "UNLIMITED": None, "x": None}
    assert {text: squeue.parse_limit(text) for text in limits} == limits


@pytest.mark.parametrize("text", ["gres:gpu:a100:4", "gres/gpu:a100:4", "gpu:a100:4"])
def test_gres_of_old_and_new_releases(text: str) -> None:
    assert squeue.plain_gres(text) == "gpu:a100:4"
    assert squeue.plain_gres(f"{text},gres:shard:1") == "gpu:a100:4,shard:1"


def test_of_elements_that_share_their_arrays_record_only_the_first_ones_are_read() -> None:
    """No more can start than there are nodes. Those that have a record of their own are all read."""
    lines = [_facts(index=str(i), id="7", state="PENDING") for i in range(1000)]
    lines += [_facts(index=str(i), id=str(i), state="PENDING") for i in range(1000, 1010)]
    lines += [_facts(index="1010", id="7", state="RUNNING")]
    found = squeue.parse_facts("\n".join(lines), 64)
    assert [fact.info.element for fact in found] == [*range(64), *range(1000, 1011)]
    rows = b"".join(_row(ArrayTaskID=str(i), Name=f"e{i}") for i in range(1011))
    texts = squeue.parse_columns(rows, squeue.ALL_COLUMNS, [fact.key for fact in found])
    assert texts is not None and texts.keys() == {fact.key for fact in found}
    assert texts["7", "63"]["Name"] == "e63"
    assert squeue.parse_columns(rows[:-1] + b" ", squeue.ALL_COLUMNS, [("7", "0")]) is None


def test_an_array_of_100_000_costs_a_few_looks_at_each_element() -> None:
    count = 100_000
    text = "\n".join(_facts(index=str(i), id="7", state="PENDING") for i in range(count))
    row = _row(Name="x")
    rows = b"".join(b"7".ljust(11) + b"\x1f" + str(i).encode().ljust(11) + row[23:] for i in range(count))
    start = time.process_time()
    for _ in range(5):
        assert sum(len(line.split(S, 4)) for line in text.split("\n")) == 5 * count
    calibration = time.process_time() - start
    start = time.process_time()
    found = squeue.parse_facts(text, 256)
    texts = squeue.parse_columns(rows, squeue.ALL_COLUMNS, [fact.key for fact in found])
    took = time.process_time() - start
    assert len(found) == 256 and texts is not None and len(texts) == 256
    assert took < 1.5 * calibration, f"{took:.3f} s, where five looks at each take {calibration:.3f} s"
