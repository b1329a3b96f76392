"""`unicronctl events`: as many lines as were asked for, whatever the log holds besides."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from unicron.ctl.cli import events
from unicron.ctl.controller.api import answers
from unicron.ctl.controller.log import records
from unicron.ctl.controller.log.records import Event
from unicron.ctl.controller.log.store import Store
from unicron.ctl.controller.model.asker import EVERYBODY
from unicron.ctl.protocol import wire

STEP = records.Step(
    iteration=1, loss=1.0, seconds=0.5, ranks=2, nodes=2, flops=1e9, train_iterations=9, micro_batches=8, computed=8
)


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind each of 40 decisions are nine steps of the training."""
    store = Store(tmp_path / "events.sqlite")
    kinds = [records.Steady(reason="works"), *[STEP] * 9]
    store.append([Event(1 + n, 1000.0 + n, "1", 0, kinds[n % 10]) for n in range(400)])

    def ask(question: dict[str, Any], address: str | None = None, timeout: float = 3.0) -> Any:
        arguments = dict(question)
        sent = wire.encode(wire.Ask(what=arguments.pop("kind"), args=arguments))
        heard = wire.decode(sent)
        return answers.answer(None, store, heard.what, heard.args, EVERYBODY)  # type: ignore[arg-type]

    monkeypatch.setattr(events, "ask_controller", ask)


def shown(*words: str) -> list[str]:
    done = CliRunner().invoke(events.command, list(words))
    assert done.exit_code == 0, done.output
    return done.output.splitlines()


def test_so_many_lines_as_were_asked_for(log: None) -> None:
    assert len(shown("-n", "12")) == 12 and all(" steady job 1: works" in line for line in shown("-n", "12"))
    assert len(shown()) == 40
    assert len(shown("-n", "12", "--steps")) == 12 and " step" in shown("-n", "12", "--steps")[-1]


def test_json_has_everything(log: None) -> None:
    ids = [json.loads(line)["id"] for line in shown("-n", "12", "--json")]
    assert ids == list(range(389, 401))


def test_after_an_id_come_the_next_ones(log: None) -> None:
    assert [json.loads(line)["id"] for line in shown("--after", "100", "-n", "3", "--json")] == [101, 102, 103]
    assert len(shown("--after", "391")) == 0 and len(shown("--after", "390")) == 1


@pytest.mark.parametrize("without", [1, "x " * 21])
def test_wrong_kinds_are_refused(without: Any) -> None:
    with pytest.raises(answers.Unanswerable, match=r"events: .*without"):
        answers.answer(None, None, "events", {"without": without}, EVERYBODY)  # type: ignore[arg-type]
