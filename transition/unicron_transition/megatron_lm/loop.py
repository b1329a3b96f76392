"""Megatron-LM's training loop on top of a session: each training step of the loop is a step of the session.

The loop counts iterations in a variable of its own. A rank that joins a running job begins the loop in its middle. One
that was left out for a while leaves the loop, and begins it again at the iteration of the others.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from unicron_transition.iteration.ledger import StepResult
from unicron_transition.iteration.rank_log import inform
from unicron_transition.megatron_lm import data
from unicron_transition.megatron_lm.between import Between
from unicron_transition.megatron_lm.save_load import checkpoints
from unicron_transition.megatron_lm.validation import IN_LOOP, Evaluation, GivenUp
from unicron_transition.megatron_lm.world import World
from unicron_transition.megatron_lm.writers import Writers
from unicron_transition.seams.megatron_lm import CannotHeal, end_was_signalled, known_timers, replace
from unicron_transition.seams.table import TIMERS, TRAINING, UnsupportedLayout
from unicron_transition.session.session import Session
from unicron_transition.snapshot.checkpoint import CheckpointError
from unicron_transition.snapshot.model_facts import of_megatron_lm


class _Elsewhere(Exception):
    """The others are at another iteration than this rank's loop."""


class Loop:
    """The loop of one rank."""

    def __init__(self, world: World):
        self._world = world
        self._session: Session | None = None
        self._results: Iterator[StepResult] = iter(())
        self._ahead: StepResult | None = None  # a step that the loop has not reached yet
        self._stepped: tuple[bool, Any, Any] = (True, None, None)  # result of the optimizer's last step
        self._over = False  # the others have come to the end
        self._key = "lm loss"
        self._began = time.time()
        self._batches: data.Batches | None = None
        self._writers = Writers(self._next_step, lambda: world.folders.save if world.folders else None)
        self._evaluation: Evaluation | None = None
        self._between = Between()

    def install(self) -> None:
        """Replace the loop's step, the decision on its end, and the writers."""
        self._writers.install()
        replace(TIMERS, "Timer.start", _start)
        replace(TIMERS, "Timer.stop", _stop)
        replace(TIMERS, "Timers._get_elapsed_time_all_ranks", lambda _: _own_times)
        replace(TRAINING, "print_datetime", _print_datetime)
        self._between.install()
        replace(TRAINING, "reduce_max_stat_across_model_parallel_group", lambda _: lambda stat, group=None: stat)
        replace(TRAINING, "train", self._train)
        replace(TRAINING, "train_step", lambda _: self._train_step)
        replace(TRAINING, "evaluate", lambda _: self._evaluate)
        replace(TRAINING, "checkpoint_and_decide_exit", lambda _: self._decide_exit)
        # Without overlapped gathers in its first iteration a newcomer would differ from the other ranks.
        replace(TRAINING, "should_disable_forward_pre_hook", lambda _: lambda args: False)

    # ------------------------------------------------------------ the loop
    def _train(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def train(
            forward_step_func: Any,
            model: Any,
            optimizer: Any,
            opt_param_scheduler: Any,
            samples: Any,
            *rest: Any,
            **more: Any,
        ) -> Any:
            from megatron.core.utils import get_model_config
            from megatron.training import get_args

            args, config = get_args(), get_model_config(model[0])
            session = self._make(
                args, forward_step_func, model, optimizer, opt_param_scheduler, data.built_samples(samples)
            )

            def to_the_end() -> Any:
                while True:
                    self._place(args)
                    self._between.hold_back(args)
                    config.no_sync_func = config.grad_sync_func = None  # the loop requires to set them itself
                    try:
                        return original(
                            forward_step_func, model, optimizer, opt_param_scheduler, samples, *rest, **more
                        )
                    except (_Elsewhere, GivenUp):
                        continue

            self._between.session = session
            self._evaluation = Evaluation(session, lambda: self._key, to_the_end)
            session.evaluations.make_up = self._making_up(forward_step_func, model, config, *rest, **more)
            try:
                session.join()
            except CheckpointError as error:
                raise CannotHeal(str(error)) from None
            ended = to_the_end()
            self._evaluation.in_loop = False
            return ended

        return train

    def _place(self, args: Any) -> None:
        """Make the loop begin at the iteration of this rank's session."""
        from megatron.core.num_microbatches_calculator import update_num_microbatches

        assert self._session is not None
        args.iteration = self._session.iteration if self._ahead is None else self._ahead.iteration
        if self._over:
            args.iteration = args.train_iters
        assert self._batches is not None
        args.consumed_train_samples = self._batches.before(args.iteration)
        update_num_microbatches(args.consumed_train_samples, consistency_check=False)
        self._world.follow()
        self._writers.note_return()

    def _next_step(self) -> int | None:
        """Return the iteration of the next line of the log, in Megatron-LM's count."""
        return None if self._session is None else self._session.iteration

    def _making_up(
        self, forward_step: Any, model: Any, config: Any, valid: Any, process: Any, *rest: Any, **_: Any
    ) -> Callable[[int], None]:
        """Return a function for a rank that joins during an evaluation of the loop."""

        def make_up(part: int) -> None:
            from megatron.training import training

            assert self._session is not None
            if part == IN_LOOP:
                iteration = self._session.iteration
                training.evaluate_and_print_results(
                    f"iteration {iteration}", forward_step, valid, model, iteration, process, config, verbose=False
                )

        return make_up

    def _evaluate(self, *arguments: Any, **keywords: Any) -> Any:
        assert self._evaluation is not None
        return self._evaluation.evaluate(*arguments, **keywords)

    def _make(self, args: Any, forward_step: Any, model: Any, optimizer: Any, scheduler: Any, samples: Any) -> Session:
        self._note_steps(optimizer)
        batches = self._batches = data.Batches(args)
        try:
            self._session = Session(
                model=model,
                optimizer=optimizer,
                scheduler=scheduler,
                micro_batches=batches.micro_batches,
                forward_step=self._noting_names(forward_step),
                fetch=lambda iteration, index: samples(batches.before(iteration), index),
                seq_length=args.seq_length,
                micro_batch_size=args.micro_batch_size,
                train_iterations=args.train_iters,
                checkpoints=checkpoints(self._world.folders, batches.before),
                seed=args.seed,
            )
        except (UnsupportedLayout, CheckpointError) as error:
            raise CannotHeal(str(error).removeprefix("unicron ")) from None
        session = self._session
        session.note_arguments(of_megatron_lm(args))
        session.finishes = False  # evaluations follow
        signal.signal(signal.SIGUSR1, lambda *_: session.request_stop())
        self._results = iter(session)
        return session

    def _note_steps(self, optimizer: Any) -> None:
        """Note the result of each optimizer step for the log: zero gradients, and whether the step was skipped."""
        step = optimizer.step

        def note_step() -> Any:
            self._stepped = step()
            return self._stepped

        optimizer.step = note_step

    def _noting_names(self, forward_step: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap the script's forward step to note its name of the loss, for the log."""

        def step(*arguments: Any, **keywords: Any) -> Any:
            output, loss_function = forward_step(*arguments, **keywords)

            def note_name(*values: Any, **more: Any) -> Any:
                result = loss_function(*values, **more)
                self._key = next(iter(result[-1]), self._key)
                return result

            return output, note_name

        return step

    # ------------------------------------------------------------ a step
    def _train_step(
        self,
        forward_step_func: Any,
        data_iterator: Any,
        model: Any,
        optimizer: Any,
        opt_param_scheduler: Any,
        config: Any,
        forward_backward_func: Any,
        iteration: int,
        **_: Any,
    ) -> tuple[Any, ...]:
        from megatron.core import parallel_state
        from megatron.training import get_args

        self._between.give_back(get_args())
        self._ask_for_the_end(get_args())
        result = self._ahead or next(self._results, None)
        self._ahead = None
        if result is None:  # the others have reached the end without this rank
            self._over = True
            raise _Elsewhere
        self._world.follow()
        if result.iteration != iteration:
            self._ahead = result
            raise _Elsewhere
        succeeded, _, zeros = self._stepped
        losses = {}
        if parallel_state.is_pipeline_last_stage(ignore_virtual=True):
            losses[self._key] = torch.tensor([result.loss], dtype=torch.float, device=self._device(model))
        return losses, int(not succeeded), False, False, 0, result.grad_norm, zeros, 0

    @staticmethod
    def _device(model: Any) -> torch.device:
        first: torch.Tensor = next(model[0].parameters())
        return first.device

    def _ask_for_the_end(self, args: Any) -> None:
        """Have all ranks end after the same iteration if one of them has to end."""
        assert self._session is not None
        signalled = args.exit_signal_handler and end_was_signalled()
        late = args.exit_duration_in_mins and time.time() - self._began > 60 * args.exit_duration_in_mins
        if signalled or late:
            self._session.request_stop()

    def _decide_exit(self, model: Any, optimizer: Any, scheduler: Any, iteration: int, *_: Any, **__: Any) -> bool:
        from megatron.training import get_args

        assert self._session is not None
        interval = get_args().exit_interval
        if not self._session.stopping and not (interval and iteration % interval == 0):
            return False
        inform(f"the training ends after iteration {iteration}")
        self.close()
        return True

    def close(self) -> None:
        """End the session, which writes its last checkpoint: the program and its evaluations are over."""
        if self._session is None:
            return
        self._session.train_iterations = self._session.iteration
        for result in self._results:
            raise RuntimeError(f"the session went on with iteration {result.iteration} after the loop's end")
        self._session.finish()


# ---------------------------------------------------------------- times
# No barrier is needed for them. Those in the log are of the rank that writes it.
def _start(original: Callable[..., None]) -> Callable[..., None]:
    def start(self: Any, barrier: bool = False) -> None:
        self._started = False  # a schedule that a loss has cut short leaves it running
        original(self)

    return start


def _stop(original: Callable[..., None]) -> Callable[..., None]:
    def stop(self: Any, barrier: bool = False) -> None:
        if self._started:
            original(self)

    return stop


def _own_times(timers: Any, names: list[str], reset: bool, barrier: bool) -> torch.Tensor | None:
    if not names:
        return None
    started = known_timers(timers)
    times = [started[name].elapsed(reset=reset) if name in started else 0.0 for name in names]
    return torch.tensor([times], dtype=torch.float, device="cpu")


def _print_datetime(original: Callable[..., None]) -> Callable[..., None]:
    def print_datetime(string: str, override_timestamp: float | None = None) -> None:
        barrier, torch.distributed.barrier = torch.distributed.barrier, lambda *_, **__: None
        try:
            original(string, override_timestamp)
        finally:
            torch.distributed.barrier = barrier

    return print_datetime
