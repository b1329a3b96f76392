"""The public face of training that survives failures. A rank prepares model, optimizer and data in a world without
peers, then enters generations (:mod:`session.training`)."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from unicron_transition.iteration.accumulation import PeerLost
from unicron_transition.iteration.ledger import StepResult
from unicron_transition.session.training import RankRejoined, Training


class Session(Training):
    """A training loop that survives the loss of ranks and nodes: iterate over it, once for each optimizer step.

    Parameters
    ----------
    model
        A `torch.nn.Module`, or the list of Megatron's DDP chunks.
    optimizer, scheduler
        torch's for a module, Megatron's for its chunks. The schedule may be None.
    micro_batches
        Number of micro-batches in an iteration, over all ranks. With Megatron also a function of the iteration that
        never falls.
    forward_step
        `forward_step(micro_batch, model)`, which returns the mean loss, or (sum of losses, tokens). With Megatron its
        `forward_step_func(data_iterator, model)`.
    fetch
        `fetch(iteration, index)`, which returns one micro-batch: a function of these two numbers and nothing else, so
        that any rank can compute any micro-batch. :class:`unicron.data.Fetch` makes one from a dataset.
    seq_length, micro_batch_size
        Tokens of a sample, and samples of a micro-batch. Megatron's schedule needs them; else they only count FLOPs.
    train_iterations
        The iteration at which the training ends.
    start_iteration
        The first iteration if there is no checkpoint to go on from.
    checkpoints
        The folder to go on from, in which the job's first members save. None for a training without checkpoints.
    seed
        Seed of the training's random numbers; by default torch's own.
    clip_grad, scaler
        Largest norm of all gradients, and a `torch.amp.GradScaler`; for a module only.
    on_bad_batch
        What becomes of a micro-batch whose loss or gradient is not finite on two ranks: "end" ends the job with one
        line that names it, "skip" makes the iteration of the others.

    Raises
    ------
    UnsupportedLayout
        For a model, an optimizer or a release that cannot be healed; one line that says what to do.
    CheckpointError
        If there are checkpoints and none can be used.
    ValueError
        For parameters that contradict each other.

    Examples
    --------
    A whole training. The same lines run in one process, under `torchrun`, and healed under `sbatch --unicron`:

    >>> import torch, unicron
    >>> unicron.init_process_group("gloo")
    >>> torch.manual_seed(1)  # doctest: +ELLIPSIS
    <torch._C.Generator object at ...>
    >>> model = torch.nn.Linear(4, 1)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> def fetch(iteration, index):
    ...     draw = torch.Generator().manual_seed(4 * iteration + index)
    ...     inputs = torch.rand(8, 4, generator=draw)
    ...     return inputs, inputs.sum(dim=1, keepdim=True)
    >>> def forward_step(micro_batch, model):
    ...     inputs, wanted = micro_batch
    ...     return torch.nn.functional.mse_loss(model(inputs), wanted)
    >>> session = unicron.Session(
    ...     model=model,
    ...     optimizer=optimizer,
    ...     scheduler=torch.optim.lr_scheduler.ConstantLR(optimizer),
    ...     micro_batches=4,
    ...     forward_step=forward_step,
    ...     fetch=fetch,
    ...     train_iterations=100,
    ...     checkpoints=unicron.Checkpoints(folder, interval=50),
    ... )
    >>> losses = [result.loss for result in session]
    >>> len(losses), losses[-1] < losses[0] / 10
    (100, True)
    >>> torch.distributed.destroy_process_group()
    """

    finishes = True
    """Whether iterating to the end calls :meth:`finish`."""

    @property
    def memory(self) -> str:
        """The memory of this rank that healing takes, in words; empty without an agent."""
        return self._reporter.memory

    @property
    def iteration(self) -> int:
        """The present iteration; between two iterations the next one."""
        return self._at.iteration

    @property
    def train_iterations(self) -> int:
        """The iteration at which the training ends. A script may set it, to the same number on all ranks."""
        return self._at.train_iterations

    @train_iterations.setter
    def train_iterations(self, iterations: int) -> None:
        self._at.train_iterations = iterations

    @property
    def stopping(self) -> bool:
        """Whether all ranks have agreed to end the training after the last iteration."""
        return self._stopping

    # ------------------------------------------------------------ the loop
    def join(self) -> int:
        """Wait until this rank is in a generation, and return its first iteration there. Iterating calls it; a script
        calls it only to know the iteration before the first step."""
        if self._channel is not None and not self._member.inside:
            self._member.rest("waiting")
            self.change_to(self._member.enter_until_in(self._member.wait_plan()))
            self.evaluations.catch_up()
        return self._at.iteration

    def __iter__(self) -> Iterator[StepResult]:
        self.join()
        while self._at.iteration < self._at.train_iterations and not self._stopping:
            try:
                result = self._train_iteration()
            except RankRejoined:
                self.evaluations.catch_up()
                continue
            left = time.perf_counter()
            yield result
            if self._at.iteration != result.iteration + 1:  # an evaluation ended at another iteration
                continue
            if self._at.iteration < self._at.train_iterations and not self._stopping:
                self._persistence.keep_boundary(self._at.iteration)
            self._outside_seconds = time.perf_counter() - left
            if self._agreed_offer is not None and self._at.iteration < self._at.train_iterations and not self._stopping:
                self.change_to(self._member.enter_until_in(self._agreed_offer))
        if self.finishes:
            self.finish()

    # ------------------------------------------------------------ between two iterations
    def evaluate(self, fetch: Callable[[int, int], Any], micro_batches: int, part: int = 0) -> float | None:
        """Evaluate the model between two iterations: forward passes in evaluation mode, dealt among the replicas.

        All ranks call it in the body of the loop after the same iteration, and get the same value, whatever the number
        of ranks. It survives the loss of ranks.

        Parameters
        ----------
        fetch
            `fetch(iteration, index)` returns a micro-batch; iteration is the next one.
        micro_batches
            Number of micro-batches in the mean.
        part
            Distinguishes evaluations between the same two iterations, in rising order.

        Returns
        -------
        The mean loss; None if the job had to go back, or this rank was left out and is at another iteration now.

        Raises
        ------
        ValueError
            For a part that is over.
        """
        before, boundary, member = self._at.moment, self._at.iteration, self._member
        self.evaluations.begin_part(boundary, part)
        while self.evaluations.running:
            self._watch.shelter(False)  # any loss ends its schedule at once
            try:
                self.evaluations.compute(fetch, micro_batches, member.replicas, member.replica, self.layout.lanes)
            except (PeerLost, RuntimeError) as error:
                if not self._is_loss(error):
                    raise
                self.regroup(error)
                if self._at.iteration == boundary:
                    self._at.moment = before
        self._watch.shelter(True)
        return self.evaluations.end()

    def communicate(self, collectives: Callable[[], Any]) -> bool:
        """Call `collectives` between two iterations: it communicates in the groups of the present generation.

        All ranks call it in the body of the loop after the same iteration, in the same order. False if a rank was lost
        meanwhile, or since the step: other ranks may be in the next iteration, and wait for none in this one. Then what
        `collectives` has made must not be used, and :attr:`iteration` may be another one.
        """
        before, boundary = self._at.moment, self._at.iteration
        if self._disturbed or self._channel is None:
            if not self._disturbed:
                collectives()
            return not self._disturbed
        self._communicating = True
        self._watch.shelter(False)  # any loss ends it at once
        try:
            collectives()
            if self._watch.lost():
                raise PeerLost("the generation ended in a collective between two iterations")
        except Exception as error:
            if not self._is_loss(error):
                raise
            self.regroup(error)
            if self._at.iteration == boundary:
                self._at.moment = before
        finally:
            self._communicating = False
        self._watch.shelter(True)
        return not self._disturbed

    def request_stop(self) -> None:
        """End the training after this iteration, on all ranks; one request is enough. Safe in a signal handler."""
        self._stop_wanted = True

    def note_arguments(self, arguments: Mapping[str, object]) -> None:
        """Note Megatron-LM's arguments about the model, which checkpoints hold for exports."""
        self._state.facts.arguments.update(arguments)

    def finish(self) -> None:
        """Write the last checkpoint, and leave the job: the training and the evaluations after it are over. Iterating
        to the end calls it, unless `finishes` is False."""
        self._at.train_iterations = self._at.iteration  # a requested end is the end for all ranks
        self._persistence.finish(self._at.iteration)
        with contextlib.suppress(RuntimeError):  # a peer that ends now has all that it needs, or is lost
            self._exchange.wait_until_sent()
        if self._channel is not None:
            self._member.publish("finished")
            self._channel.close()
