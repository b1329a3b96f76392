"""The storms' runner, with rows and clusters of the test's own: it judges, it never hangs, and it goes on."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.storms import __main__ as runner
from benchmarks.storms.rows import Row, rows
from benchmarks.storms.stage import Storm
from unicron_ctl.shared.system.errors import UserError


class Sites:
    """Hands out nothing, and counts how often it is closed."""

    def __init__(self) -> None:
        self.closed = 0

    def fresh(self) -> Any:
        return SimpleNamespace()

    def close(self) -> None:
        self.closed += 1


def step(at: float, slot: int, iteration: int, generation: int, size: int = 3) -> dict[str, Any]:
    place = {"slot": slot, "iteration": iteration, "generation": generation, "world_size": size}
    return {"time": at, **place}


def storm(*steps: dict[str, Any]) -> Storm:
    made = Storm(SimpleNamespace())
    made.job = SimpleNamespace(steps=lambda: list(steps), told=lambda: "")
    return made


def test_a_row_passes_when_nothing_that_it_asks_is_missed(snapshot) -> None:
    def good(storm: Storm) -> None:
        storm.at_most("pause", 0.51, 1.0)
        storm.figure("requeues", 1)

    def bad(storm: Storm) -> None:
        storm.at_most("pause", 1.49, 1.0)

    assert runner.play(Row("one", "", "", good, 5.0), Sites()).line() == snapshot
    failed = runner.play(Row("two", "", "", bad, 5.0), Sites())
    assert failed.line() == snapshot and not failed.passed


def test_a_row_that_hangs_or_breaks_has_failed_with_what_was_seen_and_costs_its_cluster(snapshot) -> None:
    def hangs(storm: Storm) -> None:
        storm.figure("requeues", 3)
        time.sleep(60)

    def breaks(storm: Storm) -> None:
        raise UserError("no controller answers")

    sites = Sites()
    began = time.monotonic()
    result = runner.play(Row("one", "", "", hangs, 0.2), sites)
    assert time.monotonic() - began < 30
    assert (result.passed, result.seen, result.error) == snapshot
    assert sites.closed == 1, "what still runs there is ended"
    assert runner.play(Row("two", "", "", breaks, 5.0), sites).error == "UserError: no controller answers"
    assert sites.closed == 1


def test_an_older_generation_that_goes_on_is_seen(snapshot) -> None:
    one = storm(step(1, 0, 1, 2), step(2, 0, 2, 3), step(2.5, 1, 1, 2))
    one.no_two_halves()
    assert not one.wrong, "a step that was under way may still be noted"
    two = storm(step(1, 0, 1, 2), step(2, 0, 2, 3), step(4, 1, 2, 2))
    two.no_two_halves()
    assert two.wrong == snapshot


def test_two_halves_that_give_their_generations_the_same_number_are_seen(snapshot) -> None:
    for apart in ([step(1, 0, 1, 2, 1), step(1, 1, 1, 2, 2)], [step(1, 0, 1, 2, 1), step(1, 1, 1, 2, 1)]):
        one = storm(*apart)
        one.no_two_halves()
        assert one.wrong == snapshot


def test_whole_again_is_when_all_have_stepped_in_one_younger_generation() -> None:
    one = storm(
        step(1, 0, 1, 2), step(2, 0, 2, 3), step(3, 1, 2, 3), step(4, 0, 3, 4), step(5, 1, 3, 4), step(9, 2, 3, 4)
    )
    one.generation = 2
    assert (one.whole_again(2), one.whole_again(3)) == (3, 9)


def test_a_rank_is_found_when_its_controller_is_gone_and_not_once_it_has_died() -> None:
    """Defect: ranks that are forks of a zygote were looked for by their environment, which is the zygote's."""
    one, running = storm(), [SimpleNamespace(kind="task", pid=pid) for pid in (7, 8)]
    one.site.controller = SimpleNamespace(alive=True)
    one.site.cluster = SimpleNamespace(processes=lambda: running)
    one.job.status = lambda: {"elements": [{"ranks": [{"slot": 0, "pid": 7}, {"slot": 1, "pid": 8}]}]}
    assert one.pid(0) == 7
    one.site.controller.alive = False
    one.job.status = dict
    assert one.pid(1) == 8
    running.pop()
    with pytest.raises(LookupError):
        one.pid(1)


def test_rows_have_names_of_their_own_and_unknown_ones_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    names = [row.name for row in rows(60.0, 40, 120.0, 1)]
    assert len(set(names)) == len(names)
    assert runner.main(["--list", "--only", "head"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["head-3", "head-15", "head-60"]
    with pytest.raises(SystemExit, match="2"):
        runner.main(["--only", "nonsense"])
