"""torchtitan's loaders as a session's fetch: the same micro-batch whoever asks, and no reading from the beginning."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from unicron_transition.torchtitan import streams
from unicron_transition.torchtitan.streams import NOTES, Streams


class Loader:
    """Reads forwards, as torchtitan's does; its state is where it is."""

    def __init__(self, index: int, read: list[int], length: int = 1000):
        self.index, self.at, self.read, self.length = index, 0, read, length

    def __iter__(self) -> Iterator[tuple[int, int]]:
        while self.at < self.length:
            self.at += 1
            self.read.append(self.at - 1)
            yield self.index, self.at - 1

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


@pytest.fixture
def read() -> list[int]:
    """What all loaders have read."""
    return []


@pytest.fixture
def fetch(tmp_path: Path, read: list[int], monkeypatch: pytest.MonkeyPatch) -> Streams:
    monkeypatch.setattr(streams, "NOTED_SECONDS", -1.0)  # noted at each micro-batch
    return Streams(lambda index: Loader(index, read), tmp_path)


def again(fetch: Streams, read: list[int]) -> Streams:
    """Another process of the same job."""
    return Streams(lambda index: Loader(index, read), fetch._notes)


def test_a_micro_batch_is_a_function_of_iteration_and_index(fetch: Streams, read: list[int]) -> None:
    assert [fetch(iteration, 3) for iteration in (0, 0, 1, 5)] == [(3, 0), (3, 0), (3, 1), (3, 5)]
    assert fetch(2, 3) == (3, 2), "the job went back"
    assert fetch(4, 1) == (1, 4)


def test_who_takes_a_stream_over_reads_no_more_than_what_was_not_noted(fetch: Streams, read: list[int]) -> None:
    for iteration in range(20):
        fetch(iteration, 0)
    read.clear()
    assert again(fetch, read)(20, 0) == (0, 20)
    assert read == [19, 20], "the last position that was noted is that before the last micro-batch"
    assert sorted(int(path.name) for path in (fetch._notes / "stream-0").iterdir()) == [18, 19, 20][-NOTES:]


def test_damaged_notes_cost_time_and_nothing_else(fetch: Streams, read: list[int]) -> None:
    for iteration in range(5):
        fetch(iteration, 0)
    for path in (fetch._notes / "stream-0").iterdir():
        path.write_bytes(b"half")
    read.clear()
    assert again(fetch, read)(5, 0) == (0, 5)
    assert read == list(range(6))


def test_a_folder_that_cannot_be_written_is_one_line(
    fetch: Streams, read: list[int], capfd: pytest.CaptureFixture[str]
) -> None:
    fetch._notes.joinpath("stream-0").write_text("a file")
    assert [fetch(iteration, 0) for iteration in range(4)] == [(0, iteration) for iteration in range(4)]
    assert capfd.readouterr().err.count("no positions of the data are noted") == 1


def test_data_that_end_are_said_to_end(tmp_path: Path, read: list[int]) -> None:
    fetch = Streams(lambda index: Loader(index, read, length=3), tmp_path)
    with pytest.raises(IndexError, match="ends before iteration 3: let it repeat"):
        fetch(3, 0)


def test_who_gets_a_stream_back_goes_on_from_what_the_other_has_noted(fetch: Streams, read: list[int]) -> None:
    assert fetch(3, 0) == (0, 3)
    other = again(fetch, read)
    for iteration in range(4, 20):
        other(iteration, 0)
    read.clear()
    assert fetch(20, 0) == (0, 20)
    assert read == [19, 20]


def test_a_job_that_goes_back_far_notes_where_it_is(fetch: Streams, read: list[int]) -> None:
    for iteration in range(20):
        fetch(iteration, 0)
    for iteration in range(3, 9):
        fetch(iteration, 0)
    read.clear()
    assert again(fetch, read)(9, 0) == (0, 9)
    assert read == [8, 9]
