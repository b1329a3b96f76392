"""What scripts without a session keep in memory: two lines, across restarts, in worlds of one and of several ranks."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict

import pytest
import torch

import unicron
from tests.support.kept import no_room
from tests.support.texts import raises_text
from unicron_transition.snapshot import user
from unicron_transition.snapshot.cuts import CutOrder, write_cut_note
from unicron_transition.snapshot.image_format import inventory, read_page


@pytest.fixture
def memory(tmp_path, monkeypatch):
    """As an agent gives it to a world of one."""
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("UNICRON_MEMORY", str(tmp_path))
    monkeypatch.delenv("UNICRON_AGENT", raising=False)
    monkeypatch.setattr(user, "_current", None)
    return tmp_path


def written() -> None:
    """The last save is over; what follows is as in a new process."""
    if user._current is not None:
        user._current._worker.close()
    user._current = None


def state() -> dict:
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.rand(4, 3)).sum().backward()
    optimizer.step()
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "rng": torch.get_rng_state()}


def test_what_is_saved_comes_back(memory):
    given = state() | {
        "plain": [None, True, 3, 2.5, "text", b"bytes", (1, (torch.arange(3), -1))],
        "empty": torch.empty(0, 4),
        "half": torch.rand(3, 5).bfloat16().T,
        "scalar": torch.tensor(7),
        "lazily conjugated": torch.tensor([1 + 2j, 3 - 4j]).conj(),
    }
    unicron.memory.save(given, 12)
    written()
    saved = unicron.memory.load()
    assert saved is not None and saved.iteration == 12
    assert isinstance(given["model"], OrderedDict) and list(saved.state) == list(given)
    assert saved.state["plain"][:6] == given["plain"][:6]
    assert isinstance(saved.state["plain"][6][1], tuple) and torch.equal(saved.state["plain"][6][1][0], torch.arange(3))
    assert saved.state["optimizer"]["param_groups"] == given["optimizer"]["param_groups"], "tuples stay tuples"
    for name in ("empty", "half", "scalar", "lazily conjugated", "rng"):
        assert torch.equal(saved.state[name], given[name]) and saved.state[name].dtype == given[name].dtype
    model = torch.nn.Linear(3, 2)
    model.load_state_dict(saved.state["model"])
    torch.optim.AdamW(model.parameters()).load_state_dict(saved.state["optimizer"])


def test_it_is_kept_as_it_was_and_what_is_loaded_is_ones_own(memory):
    given = {"x": torch.zeros(4)}
    unicron.memory.save(given, 1)
    given["x"] += 1
    written()
    saved = unicron.memory.load()
    saved.state["x"] += 5
    for iteration in (2, 3):
        unicron.memory.save({"x": torch.full((4,), 9.0)}, iteration)
    written()
    assert torch.equal(saved.state["x"], torch.full((4,), 5.0))


def test_a_damaged_one_is_passed_over_for_the_one_before(memory, capsys):
    for iteration in (1, 2):
        unicron.memory.save({"x": torch.full((100,), float(iteration))}, iteration)
    written()
    newest = next(found for found in inventory(memory) if found.key.iteration == 2)
    data = bytearray(newest.path.read_bytes())
    data[read_page(newest.path).offset + 7] ^= 1
    newest.path.write_bytes(data)
    saved = unicron.memory.load()
    assert saved.iteration == 1 and "do not match" in capsys.readouterr().err


def test_without_an_agent_nothing_is_kept(monkeypatch):
    monkeypatch.delenv("UNICRON_MEMORY", raising=False)
    unicron.memory.save({"x": object()}, 1)
    assert unicron.memory.load() is None


def test_where_the_agent_has_no_memory_nothing_is_kept_and_all_ranks_take_part(memory, monkeypatch):
    monkeypatch.setenv("UNICRON_MEMORY", "")
    unicron.memory.save({"x": 1}, 1)
    assert unicron.memory.load() is None and user._current is None
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(RuntimeError, match="init_process_group"):
        unicron.memory.load()


@pytest.mark.parametrize(("value", "named"), [({1, 2}, "set"), (torch.empty(3, device="meta"), "Tensor")])
def test_what_cannot_be_kept_is_one_line(memory, value, named, snapshot):
    with raises_text(TypeError, snapshot):
        unicron.memory.save({"x": value}, 1)
    assert unicron.memory.load() is None


@pytest.mark.parametrize("replicated", [True, False])
def test_without_a_thread_it_is_whole_when_the_call_returns_and_so_is_a_part_of_ones_own(
    memory, monkeypatch, replicated
):
    """The older one of all others may be written over once all have returned."""

    def refuse(thread):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    for iteration in (1, 2):
        unicron.memory.save({"x": 1}, iteration, replicated=replicated)
        assert iteration in [found.key.iteration for found in inventory(memory)]


def test_a_session_keeps_its_state_by_itself(memory, monkeypatch):
    monkeypatch.setenv("UNICRON_AGENT", "ipc://x")
    with pytest.raises(RuntimeError, match=r"unicron\.Session keeps"):
        unicron.memory.save({}, 1)


def test_where_there_is_no_room_it_is_said_once_and_tried_again(memory, monkeypatch, capsys):
    with monkeypatch.context() as broken:
        broken.setattr(os, "posix_fallocate", no_room)
        for iteration in (1, 2):
            unicron.memory.save({"x": torch.zeros(4)}, iteration)
    assert capsys.readouterr().err.count("No space left") == 1
    unicron.memory.save({"x": torch.zeros(4)}, 3)
    written()
    assert unicron.memory.load().iteration == 3


def test_a_world_that_begins_behind_an_earlier_ones_cut_keeps_its_own(memory, monkeypatch):
    def kept() -> list[tuple[int, int]]:
        written()
        return sorted((each.key.base, each.key.iteration) for each in inventory(memory) if each.path.name[:4] == "cut-")

    write_cut_note(memory, CutOrder(500))
    monkeypatch.setenv("UNICRON_GENERATION", "1")
    unicron.memory.save({"x": 1}, 500)
    assert kept() == [(1, 500)]
    write_cut_note(memory, CutOrder(103))
    monkeypatch.setenv("UNICRON_GENERATION", "2")
    unicron.memory.save({"x": 1}, 103)
    assert kept() == [(1, 500), (2, 103)]
    unicron.memory.save({"x": 1}, 104)
    assert kept() == [(1, 500), (2, 103)], "one for each"
