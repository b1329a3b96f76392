"""Reading the whole queue: in few operations, and nobody's text passes for another job."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.support.fake_programs import slurm_in
from unicron_ctl.controller.model.view import Listing
from unicron_ctl.shared.slurm import CommandLineClient, SlurmError, command_line, queue, squeue
from unicron_ctl.shared.slurm.slurm_client import Queue
from unicron_ctl.shared.slurm.squeue import columns_format

USUAL = {
    "ArrayJobID": "7",
    "ArrayTaskID": "N/A",
    "JobID": "7",
    "State": "PENDING",
    "UserName": "bob",
    "NodeList": "",
    "PriorityLong": "17",
    "Reason": "Priority",
    "Partition": "main",
    "StartTime": "N/A",
    "TimeLimit": "1-00:00:00",
    "SchedNodes": "(null)",
    "Feature": "(null)",
    "tres-per-node": "gres:gpu:8",
    "Reservation": "(null)",
    "ExcNodes": "",
}


def row(columns: queue.Columns = queue.COLUMNS[0], **texts: str) -> bytes:
    """As squeue prints it: by bytes, cut and filled up."""
    cells = USUAL | {name.replace("_", "-"): text for name, text in texts.items()}
    return b"".join(cells.get(name, "N/A").encode()[:width].ljust(width) + b"\x1f" for name, width in columns) + b"\n"


def read(*rows: bytes, but: tuple[str, ...] = ()) -> Queue:
    found = queue.parse(b"".join(rows), queue.COLUMNS[0], but)
    assert found is not None
    return found


def test_the_most_urgent_of_each_kind_and_who_occupies_nodes() -> None:
    found = read(
        row(ArrayJobID="1", PriorityLong="90"),
        row(ArrayJobID="2", PriorityLong="80"),
        row(ArrayJobID="3", PriorityLong="70", Partition="long"),
        row(ArrayJobID="4", ArrayTaskID="3", State="RUNNING", NodeList="n[1-2]"),
        row(ArrayJobID="5", State="COMPLETED", NodeList="n3"),
        row(ArrayJobID="6", ArrayTaskID="0-99999%2", PriorityLong="60", Feature="a100", SchedNodes="n[4-5]"),
    )
    assert [(e.job, e.element, e.state, e.priority) for e in found.elements] == [
        ("1", 0, "PENDING", 90),
        ("3", 0, "PENDING", 70),
        ("4", 3, "RUNNING", 17),
        ("6", 0, "PENDING", 60),
    ]
    first, _, _, last = found.elements
    assert (first.partition, first.gres, first.time_limit, first.user) == ("main", "gpu:8", 86400.0, "bob")
    assert last.features == "a100" and last.planned_nodes == {"n4", "n5"}
    assert (found.rows, found.cut) == (6, False)


def test_components_of_heterogeneous_jobs_are_told_apart_though_they_ask_for_the_same() -> None:
    found = read(
        row(ArrayJobID="2", HetJobID="2", HetJobOffset="0"),
        row(ArrayJobID="3", HetJobID="2", HetJobOffset="1"),
        row(ArrayJobID="4"),
        row(ArrayJobID="5"),
    )
    assert [(e.job, e.hetero) for e in found.elements] == [("2", "2"), ("3", "2"), ("4", "")]


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ("BeginTime,JobHeldAdmin", "BeginTime,JobHeldAdmin"),
        ("JobHeldUser,Priority", "Priority"),
        ("Resources", "Resources"),
    ],
)
def test_of_an_arrays_reasons_the_one_counts_for_which_it_may_start(said: str, reason: str) -> None:
    (found,) = read(row(Reason=said)).elements
    assert found.reason == reason


def test_our_own_jobs_are_left_out_also_where_they_are_the_first_of_their_kind() -> None:
    found = read(row(ArrayJobID="1"), row(ArrayJobID="12"), row(ArrayJobID="1", State="RUNNING"), but=("1",))
    assert [e.job for e in found.elements] == ["12"]


def test_what_does_not_fit_into_its_column_may_get_any_node() -> None:
    long = ",".join(f"m{i}" for i in range(100))
    asks = {
        "Feature": "a" * 200,
        "tres_per_node": "gpu:" * 60,
        "ExcNodes": long,
        "SchedNodes": long,
        "Partition": "p" * 99,
    }
    (one,) = read(row(**asks)).elements
    assert (one.features, one.gres, one.excluded_nodes, one.planned_nodes, one.partition) == ("", "", set(), set(), "")
    found = read(row(State="RUNNING", NodeList=long))
    assert found.cut and found.elements[0].node is None


@pytest.mark.parametrize("text", ["x\n" + "y" * 50, "\x1f" * 20, "é" * 70, "\x00"])
def test_no_text_passes_for_another_job(text: str) -> None:
    found = read(row(Feature=text), row(ArrayJobID="9", Reservation=text, State="RUNNING", NodeList="n1"))
    assert [(e.job, e.state) for e in found.elements] == [("7", "PENDING"), ("9", "RUNNING")]


@pytest.mark.parametrize("wrong", [b"x", b"\n", row()[:-1] + b" ", row().replace(b"\x1f", b"|")])
def test_columns_of_another_width_are_seen(wrong: bytes) -> None:
    assert queue.parse(row() + wrong, queue.COLUMNS[0]) is None
    assert queue.parse(b"", queue.COLUMNS[0]) == Queue()


def test_many_on_the_same_nodes_are_told_apart_up_to_a_number() -> None:
    rows = [row(ArrayJobID=str(i), State="RUNNING", NodeList="n1") for i in range(1, 100)]
    assert len(read(*rows, row(ArrayJobID="200", State="RUNNING", NodeList="n2")).elements) == queue.ON_ONE_NODE + 1


def _squeue(folder: Path, *cases: tuple[str, str]) -> CommandLineClient:
    printed = "".join(f"{pattern}) {command};;\n" for pattern, command in cases)
    return slurm_in(folder, squeue=f'echo "$*" >> {folder}/asked\ncase "$*" in\n{printed}esac')


def test_a_release_that_prints_texts_otherwise_is_asked_without_them(tmp_path: Path) -> None:
    (tmp_path / "plain").write_bytes(row(queue.COLUMNS[1]))
    client = _squeue(tmp_path, ("*Feature*", "printf nonsense"), ("*-O*", f"cat {tmp_path}/plain"))
    (one,) = client.others().elements
    assert (one.job, one.features, one.gres) == ("7", "", "")
    with pytest.raises(SlurmError, match="squeue: cannot read b'nonsense'"):
        _squeue(tmp_path, ("*-O*", "printf nonsense")).others()


@pytest.mark.parametrize("rows", [1, 3000])
def test_of_a_long_queue_each_job_is_asked_for_alone(tmp_path: Path, rows: int) -> None:
    """slurmctld then looks it up, and does not pack all the others."""
    (tmp_path / "rows").write_bytes(row() * rows)
    client = _squeue(tmp_path, ("*State*", f"cat {tmp_path}/rows"), ("*", "true"))
    client.others(("1", "2"))
    (tmp_path / "asked").unlink()
    assert client.elements({"1", "2"}) == [] and client.elements(()) == []
    asked = (tmp_path / "asked").read_text().splitlines()
    jobs = [line.split("--jobs ")[1].split()[0] for line in asked]
    assert jobs == (["1,2", "1,2"] if rows == 1 else ["1", "1", "2", "2"])


def test_a_job_that_slurm_has_forgotten_has_no_elements(tmp_path: Path) -> None:
    refused = "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1"
    assert _squeue(tmp_path, ("*", refused)).elements({"1"}) == []


def test_a_queue_of_100_000_jobs_costs_a_few_looks_at_each() -> None:
    count = 100_000
    pending = b"".join(row(ArrayJobID=str(i), Partition=f"p{i % 50}") for i in range(1000)) * (count // 1000)
    start = time.process_time()
    for _ in range(5):
        size = len(row())
        assert sum(pending[at : at + 11] == b"none" for at in range(0, len(pending), size)) == 0
    calibration = time.process_time() - start
    start = time.process_time()
    found = read(pending)
    took = time.process_time() - start
    assert len(found.elements) == 50 and found.rows == count
    assert took < 4 * calibration, f"{took:.3f} s, where five looks at each take {calibration:.3f} s"


@pytest.mark.parametrize(
    ("release", "known"), [("22.05.8", False), ("23.02.1", True), ("26.05.5", True), ("", True), ("devel", True)]
)
def test_each_release_is_asked_for_the_columns_that_it_knows(tmp_path: Path, release: str, known: bool) -> None:
    """Defect: squeue leaves out a column that it does not know, with status 0, so that the answer was never read."""
    first = queue.forms(release)[0]
    assert ("ExcNodes" in dict(first)) is known and "Reservation" in dict(first)
    (tmp_path / "rows").write_bytes(row(first))
    client = _squeue(tmp_path, ("--version", f"echo slurm-wlm {release}"), ("*-O*", f"cat {tmp_path}/rows"))
    assert [len(client.others().elements) for _ in range(3)] == [1, 1, 1]
    assert [line.split()[0] for line in (tmp_path / "asked").read_text().splitlines()].count("--version") == 1
    assert len((tmp_path / "asked").read_text().splitlines()) == 4, "one call for each listing"


def test_a_second_way_to_read_the_queue_is_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, snapshot
) -> None:
    (tmp_path / "plain").write_bytes(row(queue.COLUMNS[1]))
    client = _squeue(tmp_path, ("*Feature*", "printf nonsense"), ("*-O*", f"cat {tmp_path}/plain"))
    for _ in range(3):
        client.others()
    assert caplog.messages == snapshot


def test_what_is_asked_for_is_what_is_read() -> None:
    for columns in queue.COLUMNS:
        assert columns_format(columns).count("\x1f") == len(columns)


def test_of_a_large_array_only_what_differs_is_asked_for_each_element(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Defect: a row with all texts of each of 100,000 elements took squeue longer than its time limit."""
    monkeypatch.setattr(command_line, "LARGE", 3)
    facts = [
        ["7", str(i), "7", "PENDING", "ann", "1000", "1970-01-02T00:00:01", "5:00", "12", "N/A", "main"]
        for i in range(5)
    ]
    (tmp_path / "facts").write_text("".join("\x1f".join([*fact, "(null)", "", "(null)", ""]) + "\n" for fact in facts))

    def rows(columns: queue.Columns, *indices: str) -> bytes:
        texts = {
            "ArrayJobID": "7",
            "RestartCnt": "1",
            "exit_code": "0",
            "Reason": "Priority",
            "Name": "big",
            "QOS": "fast",
        }
        cells = [{**texts, "ArrayTaskID": index, "admin_comment": f"of {index}"} for index in indices]
        return b"".join(
            b"".join(cell.get(name, "(null)").encode()[:width].ljust(width) + b"\x1f" for name, width in columns)
            + b"\n"
            for cell in cells
        )

    (tmp_path / "own").write_bytes(rows(squeue.OWN_COLUMNS, *map(str, range(5))))
    (tmp_path / "common").write_bytes(rows(squeue.ALL_COLUMNS, "0-4"))
    client = _squeue(
        tmp_path,
        ("*--array*Name:*", "printf nonsense"),
        ("*--array*-O*", f"cat {tmp_path}/own"),
        ("*-O*", f"cat {tmp_path}/common"),
        ("*", f"cat {tmp_path}/facts"),
    )
    found = client.elements({"7"})
    assert [(e.element, e.reason, e.admin_comment, e.name, e.qos) for e in found] == [
        (i, "Priority", f"of {i}", "big", "fast") for i in range(5)
    ]


def test_what_only_the_whole_queue_shows_says_nothing_of_its_job() -> None:
    """Defect: a job of which the queue showed two rows had two elements for good, the second one in the first's place,
    and root's id for an owner."""
    shown = read(
        row(ArrayTaskID="0", State="RUNNING", NodeList="n1"),
        row(ArrayTaskID="1", State="RUNNING", NodeList="n2"),
        row(ArrayTaskID="2-3"),
    )
    seen = Listing(1.0, [], shown.elements)
    assert not seen.of("7") and {name: len(found) for name, found in seen.by_node.items()} == {"n1": 1, "n2": 1}
    assert [e.job for e in seen.waiting] == ["7"]


def test_what_waits_in_any_word_is_pending_and_what_no_table_has_keeps_its_nodes() -> None:
    found = read(
        row(ArrayJobID="1", State="SPECIAL_EXIT", PriorityLong="0", Reason="job requeued in held state"),
        row(ArrayJobID="2", State="RESV_DEL_HOLD", PriorityLong="0", Reason="Reservation rx was deleted"),
        row(ArrayJobID="3", State="RESV_DEL_HOLD", Reason="Resources"),
        row(ArrayJobID="4", State="EXPEDITING"),
        row(ArrayJobID="5", State="HIBERNATING", NodeList="n3"),
        row(ArrayJobID="6", State="REVOKED"),
    )
    assert [(e.job, e.state, e.held) for e in found.elements] == [
        ("1", "PENDING", True),
        ("2", "PENDING", True),
        ("3", "PENDING", False),
        ("4", "PENDING", False),
        ("5", "UNKNOWN", False),
    ]
