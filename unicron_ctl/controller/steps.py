"""Several `srun` in one batch script: each is a training of its own under the same job id.

A job's agents tell the number of their Slurm step. The job is of one step at a time: a later step waits until the one
before has ended, then the job begins anew. An element that was requeued runs its script from the start, while the
others are further: what they have behind them it does alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from unicron_ctl.protocol import wire

if TYPE_CHECKING:
    from unicron_ctl.controller.engine import Engine


def turn_away(engine: Engine, message: wire.Register) -> wire.Refused | None:
    """The answer to an agent whose step is not the job's; None when it may register. Begins the next step."""
    job = engine.state.jobs.get(message.job)
    if job is None or message.step == job.step:
        return None
    which = f"step {message.step} of job {message.job}"
    if job.ended:
        if message.step > job.step:
            begin(engine, message)
        return None
    if message.step > job.step:
        return wire.Refused(reason=f"{which} has to wait: step {job.step} still runs")
    reason = f"{which} is over for the other elements, which are at step {job.step}"
    return wire.Refused(reason=reason, alone=True)


def begin(engine: Engine, message: wire.Register) -> None:
    """The job starts, for the first time or with its next step."""
    engine.forget(message.job)
    settings = msgspec.to_builtins(message.settings)
    engine.emit("job_registered", message.job, settings=settings, step=message.step)
