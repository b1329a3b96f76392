"""Imports before a fork must not open the driver of a card, and leave each fork random numbers of its own."""

from __future__ import annotations

import importlib
import random
import sys
from collections.abc import Callable, Iterator
from types import ModuleType

import pytest

from unicron_detector.processes import forkable
from unicron_detector.processes.forkable import Seeds


@pytest.fixture
def torch(monkeypatch) -> ModuleType:
    """The part of torch that asks the driver, which no import may do."""
    part = ModuleType("torch._C")

    def asked() -> int:
        raise AssertionError("the driver was asked")

    part._cuda_getDeviceCount = asked  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch._C", part)
    return part


def test_imports_count_cards_by_their_device_files(torch, tmp_path, monkeypatch):
    for name in ("nvidia0", "nvidia1", "nvidiactl"):
        (tmp_path / name).touch()
    monkeypatch.setattr(forkable, "CARDS", str(tmp_path / "nvidia[0-9]*"))
    (tmp_path / "asks_at_import.py").write_text("import sys\nFOUND = sys.modules['torch._C']._cuda_getDeviceCount()\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    finders = list(sys.meta_path)
    original = torch._cuda_getDeviceCount
    with forkable.without_driver():
        assert importlib.import_module("asks_at_import").FOUND == 2
    assert torch._cuda_getDeviceCount is original and sys.meta_path == finders


def test_without_torch_nothing_is_changed(monkeypatch):
    monkeypatch.delitem(sys.modules, "torch._C", raising=False)
    with forkable.without_driver():
        importlib.import_module("colorsys")
    assert "torch._C" not in sys.modules


# ------------------------------------------------------------ random numbers
STATE = random.Random(7).getstate()


@pytest.fixture(autouse=True)
def as_it_was() -> Iterator[None]:
    state, seed = random.getstate(), random.seed
    yield
    assert random.seed == seed
    random.setstate(state)


def _imports(*calls: Callable[[], object]) -> Seeds:
    found = Seeds()
    with found.note_choices():
        for call in calls:
            call()
    random.seed()  # as after a fork
    return found


@pytest.mark.parametrize("choice", [lambda: random.seed(1), lambda: random.seed(a=1), lambda: random.setstate(STATE)])
def test_what_imports_have_chosen_is_drawn_in_every_fork(choice: Callable[[], object]) -> None:
    seeds = _imports(choice, random.random)
    choice()
    wanted = (random.random(), random.random())[1]  # an import has drawn the first
    for _ in range(2):
        seeds.renew()
        assert random.random() == wanted


@pytest.mark.parametrize(
    "calls",
    [(), (random.random,), (lambda: random.seed(1), lambda: random.seed()), (lambda: random.seed(version=2),)],
)
def test_what_nobody_has_chosen_is_each_forks_own(calls: tuple[Callable[[], object], ...]) -> None:
    seeds = _imports(*calls)
    before = random.getstate()
    seeds.renew()
    assert random.getstate() == before
