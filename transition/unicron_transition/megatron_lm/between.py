"""Lets Megatron-LM's loop communicate between two iterations, for its log and for its checks.

The groups of the generation stand there, so it is done as without Unicron. A loss meanwhile is recovered as one
between two iterations (:meth:`Session.communicate`): the ranks that had not come so far leave out the rest until the
next iteration, since the others may be in it already. The learning rate and the norm of the gradients are the same in
all ranks and need nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist

from unicron_transition.iteration.rank_log import inform
from unicron_transition.megatron_lm.validation import GivenUp
from unicron_transition.seams import elastic_buckets, megatron_trackers
from unicron_transition.seams.megatron_lm import follow_straggler_detector, replace
from unicron_transition.seams.table import TRAINING
from unicron_transition.session.session import Session

CHECKS = "check_weight_hash_across_dp_replicas_interval"
# The options that communicate after the log, and their values for "off".
CALLBACKS: Mapping[str, Any] = {"log_straggler": False, CHECKS: None, "gpu_sniff_test_interval": None}
# Those that the loop already obeys before its first iteration. A rank begins it whenever it joins, so it would wait for
# ranks that are in the middle of it.
AT_THE_START = (CHECKS, "gpu_sniff_test_interval")


class Between:
    """The communication of one rank's loop. `session` is set when the loop begins."""

    def __init__(self) -> None:
        self.session: Session | None = None
        self._held_back: dict[str, Any] = {}

    def install(self) -> None:
        """Replace the functions of the loop that communicate, and the sums that are made here."""
        replace(TRAINING, "training_log", self._log)
        replace(TRAINING, "calc_params_l2_norm", self._norm)
        replace(TRAINING, "post_training_step_callbacks", self._callbacks)
        megatron_trackers.leave_sums_to_the_session()

    def hold_back(self, args: Any) -> None:
        """Turn off what the loop would do before its first iteration; :meth:`give_back` turns it on again."""
        for name in AT_THE_START:
            if getattr(args, name, None) is not None:
                self._held_back[name] = getattr(args, name)
                setattr(args, name, None)

    def give_back(self, args: Any) -> None:
        """Turn on what :meth:`hold_back` has turned off: the loop is in an iteration."""
        for name, value in self._held_back.items():
            setattr(args, name, value)
        self._held_back.clear()

    def _communicate(self, collectives: Callable[[], Any]) -> bool:
        """Whether all members have come to the end of `collectives`. Raises :class:`GivenUp` if this rank's loop has to
        begin again, at another iteration."""
        assert self.session is not None
        iteration = self.session.iteration
        done = self.session.communicate(collectives)
        if self.session.iteration != iteration:
            raise GivenUp
        return done

    # ------------------------------------------------------------ the log
    def _log(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Let the loop log its first iteration at once only at the start of the training, and not when a rank joins.
        Auxiliary losses are summed over all ranks before; they are NaN, and not in the line, if that was given up."""

        def training_log(losses: Any, totals: Any, rate: Any, iteration: int, *rest: Any, **keywords: Any) -> Any:
            from megatron.training import get_args

            keywords["is_first_iteration"] = bool(keywords.get("is_first_iteration")) and iteration == 1
            if not self._add_up(get_args()):
                megatron_trackers.spoil()
            return original(losses, totals, rate, iteration, *rest, **keywords)

        return training_log

    def _add_up(self, args: Any) -> bool:
        if not getattr(args, "num_experts", None) and not getattr(args, "mtp_num_layers", None):
            return True
        megatron_trackers.complete(args, torch.device(torch.cuda.current_device()))
        assert self.session is not None
        layout = self.session.layout
        return self._communicate(lambda: megatron_trackers.add_up(dist.all_reduce, layout.tensor, layout.lanes))

    def _norm(self, original: Callable[..., float]) -> Callable[..., float | None]:
        def calc_params_l2_norm(model: Any, *arguments: Any, **keywords: Any) -> float | None:
            found: list[float] = []
            done = self._communicate(lambda: found.append(original(model, *arguments, **keywords)))
            return found[0] if done else None

        return calc_params_l2_norm

    # ------------------------------------------------------------ checks and reports
    def _callbacks(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """The real ones, or, if a rank was lost, once more without those that communicate."""

        def post_training_step_callbacks(model: Any, *arguments: Any, **keywords: Any) -> Any:
            from megatron.training import get_args

            args = get_args()
            if all(getattr(args, name, None) == off for name, off in CALLBACKS.items()):
                return original(model, *arguments, **keywords)
            results: list[Any] = []

            def collectives() -> None:
                if getattr(args, CHECKS, None) is not None and args.overlap_param_gather:
                    elastic_buckets.gather_without_forward(model)  # each rank has stepped its own part only
                if args.log_straggler:
                    follow_straggler_detector()
                results.append(original(model, *arguments, **keywords))

            if self._communicate(collectives):
                return results[0]
            inform("the checks between two iterations were left out: a rank was lost meanwhile")
            with _set(args, {name: off for name, off in CALLBACKS.items() if hasattr(args, name)}):
                return original(model, *arguments, **keywords)

        return post_training_step_callbacks


@contextlib.contextmanager
def _set(args: Any, values: Mapping[str, Any]) -> Iterator[None]:
    """Give the arguments these values in the body."""
    before = {name: getattr(args, name, None) for name in values}
    vars(args).update(values)
    try:
        yield
    finally:
        vars(args).update(before)
