"""Runs in which nothing is wrong, of varied models, optimizers, ranks and losses: any finding is a false alarm."""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import NamedTuple

from tests.support.jobs import World

AUDIT, COMPARE = 16, 8  # far more often than by default
LIMIT = 3600.0
PATIENT = "hang_floor_seconds = 60.0\n"  # a slow second of the machine is no finding about numbers
MEGATRON = 5  # every so many runs is one of Megatron's tiny GPT
MODELS = ("attention", "convolution", "perceptron", "recurrent")
OPTIMIZERS = ("AdamW", "Adam", "SGD", "RMSprop", "Adagrad")
ALARMS = ("failure_detected", "break", "reform", "ledger_violation")


class Run(NamedTuple):
    """A run."""

    title: str
    ranks: int
    command: list[str] | None
    """None for tiny_gpt."""
    variables: dict[str, str]


def runs(count: int, iterations: int, seed: int) -> list[Run]:
    """Return so many runs, varied by chance."""
    draw, found = random.Random(seed), []
    for number in range(count):
        ranks = 2 + number % 3
        micro_batches, dropout = draw.randint(ranks, 3 * ranks), draw.choice(["0", "0.1", "0.3"])
        tokens = draw.choice("01")
        more = f"{ranks} ranks, {micro_batches} micro-batches, dropout {dropout}" + ", by token" * int(tokens)
        if number % MEGATRON == MEGATRON - 1:
            sharded = draw.choice("01")
            settings = {"HIDDEN": "16", "SEQUENCE": "8", "DROPOUT": dropout, "TOKENS": tokens, "DISTOPT": sharded}
            settings |= {"MICRO_BATCHES": str(micro_batches), "ITERATIONS": str(iterations)}
            title = f"Megatron's GPT{', distributed optimizer' * int(sharded)}, {more}"
            found.append(Run(title, ranks, None, {f"TINY_{name}": value for name, value in settings.items()}))
            continue
        model, optimizer = draw.choice(MODELS), draw.choice(OPTIMIZERS)
        settings = {"MODEL": model, "OPTIMIZER": optimizer, "DROPOUT": dropout, "TOKENS": tokens}
        settings |= {"MICRO_BATCHES": str(micro_batches), "ITERATIONS": str(iterations)}
        command = [sys.executable, str(Path(__file__).with_name("healthy_train.py"))]
        variables = {f"HEALTHY_{name}": value for name, value in settings.items()}
        found.append(Run(f"{model}, {optimizer}, {more}", ranks, command, variables))
    return found


def alarms(folder: Path, run: Run) -> tuple[list[str], list[str]]:
    """Train it to its end; return the alarms, and what the ranks said of audits. Raises AssertionError if it does not
    come to its end."""
    checks = {"UNICRON_AUDIT": str(AUDIT), "UNICRON_COMPARE": str(COMPARE), "UNICRON_MODE": "session"}
    with World(folder, run.ranks, PATIENT, run.command, **run.variables, **checks) as world:
        world.wait(lambda: world.job().get("ended"), f"{run.title} is at its end", LIMIT)
        ended, logs = world.job()["ended"], world.array.logs
        assert ended["code"] == 0, f"{run.title}: {ended}\n{logs[-3000:]}"
        found = [f"{each['kind']}: {each['reason']}" for each in world.events(*ALARMS)]
    return found, [line for line in logs.splitlines() if "audited" in line or "do not repeat" in line]
