"""Loggers: one rank writes at a time, and nothing is missing or written twice when another rank takes over."""

from __future__ import annotations

import atexit
import sys
from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from tests.support.event_files import read
from tests.support.texts import raises_text
from unicron import loggers
from unicron_transition.iteration.ledger import StepResult


def result(iteration: int) -> StepResult:
    return StepResult(iteration, iteration / 2, 1.5, 1e-3, 0.25, 1, 3)


@pytest.fixture
def world(monkeypatch):
    """world.rank is the rank of the process that calls next."""
    found = SimpleNamespace(rank=0)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_rank", lambda: found.rank)
    return found


def train(world, ranks, steps, die=None) -> None:
    """Let each of the ranks, a dictionary by rank, log these steps; `die` ends before it logs the last one."""
    for step in steps:
        for rank, logger in ranks.items():
            if not (step == steps[-1] and rank == die):
                world.rank = rank
                logger(result(step), extra=step)


# ------------------------------------------------------------ TensorBoard
@pytest.mark.parametrize("flushed", [True, False])
def test_tensorboard_shows_each_step_once_when_the_writer_dies(world, tmp_path, flushed):
    """The writer dies with its last step written, or before it."""
    pytest.importorskip("tensorboard")
    ranks = {rank: loggers.TensorBoard(tmp_path) for rank in range(3)}
    train(world, ranks, range(5), die=None if flushed else 0)
    rest = {0: ranks[1], 1: ranks[2]}
    train(world, rest, range(5, 8))
    shown = read(tmp_path)
    assert shown["loss"] == [(step, step / 2) for step in range(8)]
    assert {tag: [step for step, _ in values] for tag, values in shown.items()} == {
        tag: [*range(8)] for tag in ("loss", "learning-rate", "seconds", "grad-norm", "ranks", "extra")
    }


def test_tensorboard_goes_with_a_rank_that_joins_as_the_first_and_a_job_that_goes_back(world, tmp_path):
    pytest.importorskip("tensorboard")
    ranks = {rank: loggers.TensorBoard(tmp_path) for rank in range(2)}
    train(world, ranks, range(3))
    joined = {0: loggers.TensorBoard(tmp_path), 1: ranks[0], 2: ranks[1]}
    train(world, joined, range(3, 6))
    train(world, joined, range(4, 8))
    assert read(tmp_path)["loss"] == [(step, step / 2) for step in range(8)]


# ------------------------------------------------------------ services
class Runs:
    """Stands for wandb: runs by id, whose steps only rise."""

    def __init__(self):
        self.runs, self.down = defaultdict(list), False

    def init(self, id, resume, project):
        assert (resume, project) == ("allow", "p")
        if self.down:
            raise OSError("no network")
        log = self.runs[id]

        def write(scalars, step, commit):
            assert not log or step > log[-1][0], "wandb would drop it"
            log.append((step, scalars["loss"]))

        return SimpleNamespace(step=log[-1][0] + 1 if log else 0, log=write, finish=lambda: None)


def test_a_run_of_wandb_is_resumed_by_each_writer(world, monkeypatch):
    service = Runs()
    monkeypatch.setitem(sys.modules, "wandb", service)
    monkeypatch.setenv("SLURM_ARRAY_JOB_ID", "77")
    ranks = {rank: loggers.WandB(project="p") for rank in range(2)}
    train(world, ranks, range(4), die=0)
    train(world, {0: ranks[1]}, range(4, 6))
    train(world, {0: ranks[1]}, range(3, 8))
    assert dict(service.runs) == {"unicron-77": [(step, step / 2) for step in range(8)]}


def test_a_service_that_is_down_costs_a_line_and_is_caught_up_with(world, monkeypatch, capfd):
    service = Runs()
    monkeypatch.setitem(sys.modules, "wandb", service)
    mine = loggers.WandB("run", project="p")
    service.down = True
    train(world, {0: mine}, range(3))
    service.down = False
    train(world, {0: mine}, range(3, 5))
    assert [step for step, _ in service.runs["run"]] == [0, 1, 2, 3, 4]
    output = capfd.readouterr().err
    assert output.count("iteration 0,") == output.count("no network") == 1 and "iteration 1," not in output, output


class Client:
    """Stands for MLflow's client."""

    store: dict = {}

    def __init__(self, tracking_uri):
        assert tracking_uri == "file:/x"

    get_experiment_by_name = staticmethod(lambda name: None)
    create_experiment = staticmethod(lambda name: "0")

    def search_runs(self, experiments, condition):
        return [each for each in self.store.values() if condition.endswith(f"= '{each.name}'")]

    def create_run(self, experiment, run_name, tags):
        info = SimpleNamespace(run_id=f"id-{run_name}", status="RUNNING")
        run = SimpleNamespace(info=info, name=tags["unicron.run"], metrics=[])
        return self.store.setdefault(run.info.run_id, run)

    def update_run(self, run, status):
        self.store[run].info.status = status

    set_terminated = update_run

    def get_metric_history(self, run, name):
        return [each for each in self.store[run].metrics if each.key == name]

    def log_batch(self, run, metrics):
        self.store[run].metrics += metrics


@pytest.fixture
def mlflow(monkeypatch):
    """Replace the package; returns what it registers for the end of the process."""

    def metric(key, value, timestamp, step):
        return SimpleNamespace(key=key, value=value, step=step)

    Client.store = {}
    module = SimpleNamespace(MlflowClient=Client, entities=SimpleNamespace(Metric=metric))
    monkeypatch.setitem(sys.modules, "mlflow", module)
    monkeypatch.setattr(sys, "excepthook", lambda *error: None)
    at_end = []
    monkeypatch.setattr(atexit, "register", at_end.append)
    return at_end


@pytest.mark.parametrize("failed", [False, True])
def test_a_run_of_mlflow_ends_with_the_process_that_writes_it(world, mlflow, failed):
    ranks = {rank: loggers.MLflow("mine", tracking_uri="file:/x") for rank in range(2)}
    train(world, ranks, range(3))
    (run,) = Client.store.values()
    assert run.info.status == "RUNNING"
    if failed:
        sys.excepthook(ValueError, ValueError("x"), None)
    assert len(mlflow) == 1, "the other rank writes nothing"
    mlflow[0]()
    assert run.info.status == ("FAILED" if failed else "FINISHED")
    train(world, {0: ranks[1]}, range(3, 5))
    assert run.info.status == "RUNNING", "a healed job goes on with it"
    train(world, {1: ranks[1]}, [5])
    mlflow[1]()
    assert run.info.status == "RUNNING", "now another rank writes it"


def test_a_run_of_mlflow_ends_with_its_block(world, mlflow):
    world.rank = 0
    with pytest.raises(ValueError, match="of the script"), loggers.MLflow("mine", tracking_uri="file:/x") as log:
        log(result(1))
        raise ValueError("of the script")
    (run,) = Client.store.values()
    assert run.info.status == "FAILED"
    with loggers.MLflow("mine", tracking_uri="file:/x") as log:
        log(result(2))
        assert run.info.status == "RUNNING"
    assert run.info.status == "FINISHED"


def test_a_run_of_mlflow_is_found_again_by_each_writer(world, mlflow):
    ranks = {rank: loggers.MLflow("mine", tracking_uri="file:/x") for rank in range(2)}
    train(world, ranks, range(4))
    train(world, {0: ranks[1]}, range(4, 6))
    (run,) = Client.store.values()
    assert [(each.step, each.value) for each in run.metrics if each.key == "loss"] == [(s, s / 2) for s in range(6)]


def test_what_is_missing_is_one_line(monkeypatch, snapshot):
    monkeypatch.setitem(sys.modules, "mlflow", None)
    with raises_text(ValueError, snapshot):
        loggers.MLflow("run")
    for name in ("SLURM_ARRAY_JOB_ID", "SLURM_JOB_ID"):
        monkeypatch.delenv(name, raising=False)
    with raises_text(ValueError, snapshot):
        loggers.WandB()
