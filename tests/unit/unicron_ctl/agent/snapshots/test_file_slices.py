"""Agents of nodes that hold the same state write a slice of its checkpoint each, and those of nodes that are lost."""

from __future__ import annotations

import errno
import os
import time
from pathlib import Path

import pytest
import torch

from tests.support.flips import flip
from tests.support.kept import WRITER, everything, same, training
from tests.support.processes import wait_for
from unicron_ctl.agent.connections.job_environment import Place
from unicron_ctl.agent.snapshots import file_slices
from unicron_ctl.agent.snapshots.checkpoint_files import Files
from unicron_ctl.agent.snapshots.node_memory import Memory
from unicron_ctl.shared.protocol import structs
from unicron_transition.snapshot import checkpoint_file, folders
from unicron_transition.snapshot.checkpoint import Checkpoints
from unicron_transition.snapshot.checkpoint_file import Slice
from unicron_transition.snapshot.contents import Gatherer
from unicron_transition.snapshot.image_format import ImagePage
from unicron_transition.snapshot.keeper import Keeper
from unicron_transition.snapshot.migrate import TrainingState

NODES = 3
ITERATION = 4


def state_of_some_size(seed: int = 0) -> TrainingState:
    """A state of parameters of the same size."""
    state = training(seed)
    for number in range(6):
        state.model[0].module.register_buffer(f"more{number}", torch.full((9000,), float(number + seed)))
    return state


class Node:
    """One node: its memory, and its agent's thread."""

    def __init__(self, folder: Path, number: int):
        self.saves = folder / "saves"
        settings = structs.Settings(name="a", user="b")
        place = Place(job="7", element=number, node=f"n{number}", address="127.0.0.1", settings=settings)
        (folder / f"memory{number}").mkdir(exist_ok=True)
        self.memory = Memory(place, {"UNICRON_MEMORY_DIR": str(folder / f"memory{number}")}, print)
        self.memory.open("a1")
        assert self.memory.folder is not None
        checkpoint_file.note_destination(self.memory.folder, checkpoint_file.Destination(self.saves, 1))
        self.number, self.said = number, list[str]()
        self.aside = Path()

    def keep(self, state: TrainingState, count: int = NODES, iteration: int = ITERATION) -> None:
        """Let the node's rank set the state aside."""
        assert self.memory.folder is not None
        keeper, cut = Keeper(self.memory.folder, self.number, 1), Slice(self.number, count)
        keeper.copy(Gatherer(state), iteration, 1, WRITER, aside=cut)
        keeper.close()
        self.aside = checkpoint_file.aside_path(self.memory.folder, self.number, iteration, cut)

    def start(self, rate: float = 0.0) -> Files:
        """Start the agent's thread."""
        return Files(self.memory, lambda key: (), rate, self.said.append)

    @property
    def files(self) -> list[str]:
        """The names of the checkpoint's files, without mark and place."""
        found = self.saves.glob(f"iteration-{ITERATION:08d}/*.image")
        return sorted(path.name.split(".", 3)[3].split(".")[0] for path in found)


@pytest.fixture
def nodes(tmp_path: Path) -> list[Node]:
    """Nodes of which each holds the same state."""
    found = [Node(tmp_path, number) for number in range(NODES)]
    for each in found:
        each.keep(state_of_some_size())
    return found


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_slices, "TURN_SECONDS", 0.5)
    monkeypatch.setattr(file_slices, "LEAST_PAUSE", 0.05)


def iterations(saves: Path) -> list[int]:
    return [each.iteration for each in folders.whole(saves)]


def is_sound(saves: Path, seed: int = 0) -> bool:
    """Whether the newest checkpoint has the state that the nodes hold."""
    found = training(seed=3)
    for number in range(6):
        found.model[0].module.register_buffer(f"more{number}", torch.zeros(9000))
    return Checkpoints(saves).load(found) == ITERATION and same(everything(found), everything(state_of_some_size(seed)))


def test_each_writes_its_own_slice_and_keeps_the_image_until_all_are_there(nodes: list[Node]) -> None:
    writers = [each.start() for each in nodes[:2]]
    wait_for(lambda: nodes[0].files == ["slice-0-of-3", "slice-1-of-3"], "two slices")
    assert nodes[0].aside.exists() and nodes[1].aside.exists() and not iterations(nodes[0].saves)
    writers.append(nodes[2].start())
    wait_for(lambda: not any(each.aside.exists() for each in nodes), "all are released")
    assert [writer.results.take_all() for writer in writers] == [[ITERATION]] * NODES
    for writer in writers:
        writer.close()
    assert iterations(nodes[0].saves) == [ITERATION] and is_sound(nodes[0].saves)
    assert nodes[0].files == [f"slice-{number}-of-3" for number in range(NODES)]


@pytest.mark.parametrize("lost", [[0], [2], [0, 1]])
def test_one_that_is_left_writes_the_slices_of_lost_nodes(nodes: list[Node], impatient, lost: list[int]) -> None:
    writers = [each.start() for each in nodes if each.number not in lost]
    wait_for(lambda: iterations(nodes[0].saves), "the checkpoint")
    for writer in writers:
        writer.close(20.0)
    assert is_sound(nodes[0].saves)
    assert all(each.aside.exists() == (each.number in lost) for each in nodes)


def test_one_that_dies_midway_leaves_no_slice_and_its_successor_or_another_node_writes_it(
    nodes: list[Node], impatient
) -> None:
    dying = nodes[1].start(rate=1.0)  # a byte a second
    wait_for(lambda: list(nodes[1].saves.glob("*/*.new")), "it is being written")
    dying.close()
    assert not iterations(nodes[0].saves) and nodes[1].aside.exists()
    writers = [nodes[number].start() for number in (0, 2)]
    wait_for(lambda: iterations(nodes[0].saves), "the others complete it")
    writers.append(nodes[1].start())
    for writer in writers:
        writer.close(20.0)
    assert is_sound(nodes[0].saves) and not any(each.aside.exists() for each in nodes)


def test_nobody_writes_for_a_slow_node(nodes: list[Node], impatient) -> None:
    size = checkpoint_file.asides(nodes[2].memory.folder)[0].data_bytes
    writers = [each.start(rate=size / NODES / 3.0 if each.number == 2 else 0.0) for each in nodes]
    began = time.monotonic()
    wait_for(lambda: iterations(nodes[0].saves), "the checkpoint")
    assert time.monotonic() - began > 1.0
    for writer in writers:
        writer.close(20.0)
    assert is_sound(nodes[0].saves)


def test_a_state_that_differs_in_one_node_makes_no_checkpoint_with_the_others(tmp_path: Path, impatient) -> None:
    """One of the two writes all of its own; which one does not matter, since each is whole."""
    nodes = [Node(tmp_path, number) for number in range(2)]
    for each in nodes:
        each.keep(state_of_some_size(seed=each.number), 2)
    writers = [each.start() for each in nodes]
    wait_for(lambda: not any(each.aside.exists() for each in nodes), "all are released")
    for writer in writers:
        writer.close(20.0)
    (found,) = folders.whole(nodes[0].saves)
    assert len(found.paths) == 2 and len({path.name.split(".")[-2] for path in found.paths}) == 1
    assert is_sound(nodes[0].saves, 0) or is_sound(nodes[0].saves, 1)
    for node in nodes:
        text = f"slice {node.number} of 2, of this node, and slice {1 - node.number} are of different states"
        assert [text in line for line in node.said].count(True) <= 1
    assert any("are of different states" in line for node in nodes for line in node.said), "the user is told"


def test_nobody_is_told_of_replicas_that_agree(nodes: list[Node], impatient) -> None:
    writers = [each.start() for each in nodes[:2]]
    wait_for(lambda: iterations(nodes[0].saves), "the checkpoint")
    for writer in writers:
        writer.close(20.0)
    assert not any("different states" in line for node in nodes for line in node.said)


def test_what_memory_has_damaged_in_one_node_comes_from_another(nodes: list[Node], impatient) -> None:
    flip(nodes[1].aside)
    writers = [each.start() for each in nodes]
    wait_for(lambda: iterations(nodes[0].saves), "the checkpoint")
    for writer in writers:
        writer.close(20.0)
    assert is_sound(nodes[0].saves) and "its data do not match their checksum" in nodes[1].said[0]
    assert not any(each.aside.exists() for each in nodes)


def test_a_rank_that_wrote_the_whole_file_ends_the_wait(nodes: list[Node]) -> None:
    """One without room in memory does so."""
    writer = nodes[1].start()
    wait_for(lambda: nodes[1].files, "a slice")
    Checkpoints(nodes[1].saves).save_last(state_of_some_size(), ITERATION, WRITER)
    wait_for(lambda: not nodes[1].aside.exists(), "it is released")
    writer.close()
    assert is_sound(nodes[1].saves)


def test_a_node_that_cannot_write_keeps_none_from_removing_older_checkpoints(
    nodes: list[Node], impatient, monkeypatch
) -> None:
    """The first node: its folder is not mounted."""
    persist = checkpoint_file.persist

    def refused(found: ImagePage, *more) -> Path:
        if found.path == nodes[0].aside:
            raise OSError(errno.EACCES, os.strerror(errno.EACCES))
        return persist(found, *more)

    monkeypatch.setattr(checkpoint_file, "persist", refused)
    Checkpoints(nodes[0].saves).save_last(training(seed=5), 2, WRITER)
    writers = [each.start() for each in nodes]
    wait_for(lambda: iterations(nodes[0].saves) == [ITERATION], "the older one is gone")
    for writer in writers:
        writer.close(20.0)
    assert is_sound(nodes[0].saves) and "Permission denied" in nodes[0].said[0]


def test_older_checkpoints_are_removed_when_the_last_slice_is_there(nodes: list[Node]) -> None:
    Checkpoints(nodes[0].saves).save_last(training(seed=5), 2, WRITER)
    writers = [each.start() for each in nodes[:2]]
    wait_for(lambda: len(nodes[0].files) == 2, "two slices")
    assert iterations(nodes[0].saves) == [2]
    writers.append(nodes[2].start())
    wait_for(lambda: iterations(nodes[0].saves) == [ITERATION], "the older one is gone")
    for writer in writers:
        writer.close()


def test_an_agent_that_ends_leaves_what_is_not_complete_to_the_next_one(nodes: list[Node], impatient) -> None:
    writer = nodes[2].start()
    wait_for(lambda: nodes[2].files, "its slice")
    writer.close()
    assert nodes[2].aside.exists()
    nodes[2].start().close(20.0)
    assert not nodes[2].aside.exists() and is_sound(nodes[2].saves)
