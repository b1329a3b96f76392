"""TensorBoard, Weights & Biases and MLflow: one run for one job, whichever rank writes."""

from __future__ import annotations

import atexit
import os
import sys
import time
from typing import Any

from unicron_transition.iteration.rank_log import warn
from unicron_transition.loggers.logger import Logger, import_optional, job_name

TAG = "unicron.run"  # tag of the run in MLflow


class TensorBoard(Logger):
    """TensorBoard's event files: one for each process that was the first rank.

    A file begins with the step from which TensorBoard ignores earlier files, so no step shows twice.

    Parameters
    ----------
    folder
        A folder that all nodes share.

    Raises
    ------
    ValueError
        If tensorboard is not installed.
    """

    def __init__(self, folder: str | os.PathLike[str]):
        super().__init__()
        self._folder = os.fspath(folder)
        import_optional("tensorboard", "tensorboard")
        self._make = import_optional("torch.utils.tensorboard", "tensorboard").SummaryWriter
        self._writer: Any = None

    def _open_run(self, first: int) -> int:
        self._writer = self._make(self._folder, purge_step=first)
        return first - 1

    def _write(self, step: int, scalars: dict[str, float]) -> None:
        for name, value in scalars.items():
            self._writer.add_scalar(name, value, step)

    def _flush(self) -> None:
        self._writer.flush()

    def _close_run(self) -> None:
        self._writer.close()


class WandB(Logger):
    """A run of Weights & Biases. Offline, each new first rank has a folder of its own, and `wandb sync` joins them.

    Parameters
    ----------
    run
        Its id, by default from the job's number; each new first rank resumes it.
    settings
        For `wandb.init`, such as `project`.

    Raises
    ------
    ValueError
        If wandb is not installed, or the run has no name.
    """

    def __init__(self, run: str | None = None, **settings: Any):
        super().__init__()
        self._name, self._settings = run or job_name(), settings
        self._wandb = import_optional("wandb", "wandb")
        self._run: Any = None

    def _open_run(self, first: int) -> int:
        self._run = self._wandb.init(id=self._name, resume="allow", **self._settings)
        begun = int(self._run.step or 0)  # the next step; 0 for a new run
        return max(first - 1, begun - 1)

    def _write(self, step: int, scalars: dict[str, float]) -> None:
        self._run.log(scalars, step=step, commit=True)

    def _close_run(self) -> None:
        self._run.finish()


class MLflow(Logger):
    """A run of MLflow. It ends with the process that writes it, as FAILED after an uncaught exception, and continues
    when another process writes.

    Parameters
    ----------
    run
        Its name, by default from the job's number; it is found again by a tag.
    experiment
        Its experiment's name.
    tracking_uri
        The server; by default MLFLOW_TRACKING_URI.

    Raises
    ------
    ValueError
        If mlflow is not installed, or the run has no name.
    """

    def __init__(self, run: str | None = None, experiment: str = "Default", tracking_uri: str | None = None):
        super().__init__()
        self._name, self._experiment, self._uri = run or job_name(), experiment, tracking_uri
        self._mlflow = import_optional("mlflow", "mlflow")
        self._client: Any = None
        self._run = ""
        self._failed = self._watches = False

    def _open_run(self, first: int) -> int:
        self._watch()
        self._client = self._client or self._mlflow.MlflowClient(tracking_uri=self._uri)
        experiment = self._client.get_experiment_by_name(self._experiment)
        number = experiment.experiment_id if experiment else self._client.create_experiment(self._experiment)
        found = self._client.search_runs([number], f"tags.`{TAG}` = '{self._name}'")
        if not found:
            self._run = self._client.create_run(number, run_name=self._name, tags={TAG: self._name}).info.run_id
            return first - 1
        self._run = found[0].info.run_id
        self._client.update_run(self._run, status="RUNNING")
        history = self._client.get_metric_history(self._run, "ranks")
        return max([first - 1, *(int(each.step) for each in history)])

    def _write(self, step: int, scalars: dict[str, float]) -> None:
        metric, now = self._mlflow.entities.Metric, int(1000 * time.time())
        self._client.log_batch(self._run, [metric(name, value, now, step) for name, value in scalars.items()])

    def _close_run(self) -> None:
        """Do nothing: each call is written at once, and another rank continues the run."""

    def close(self) -> None:
        """End the run if this rank writes it; the next call continues it."""
        if not self._open:
            return
        super().close()
        try:
            self._client.set_terminated(self._run, "FAILED" if self._failed else "FINISHED")
        except Exception as error:  # of the service, after the end of the training
            warn(f"MLflow: the run of {self._name} is not marked as ended: {error}")

    def __exit__(self, *error: object) -> None:
        self._failed = isinstance(error[1], Exception) or (isinstance(error[1], SystemExit) and bool(error[1].code))
        self.close()

    def _watch(self) -> None:
        """End the run when this process ends in any way but by a signal."""
        if self._watches:
            return
        self._watches, before = True, sys.excepthook

        def hook(*error: Any) -> None:
            self._failed = True
            before(*error)

        sys.excepthook = hook
        atexit.register(self.close)
