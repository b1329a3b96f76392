from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import pytest

from unicron_detector.processes.fork_seeds import Seeds

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
