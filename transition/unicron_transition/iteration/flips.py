"""Silent faults of a rank, on purpose: a bit flips in one number of its work, or the number becomes NaN
(:mod:`unicron_detector.chaos.inject`). Nothing here acts unless an agent has ordered it.

Of a random tensor the number of the largest magnitude is hit: most others hardly change the loss.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

from unicron_detector.chaos.inject import Flip, injector
from unicron_transition.iteration.rank_log import inform, warn
from unicron_transition.seams.dtensors import local

Entry = tuple[str, torch.Tensor]
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # bytes -> dtype of the same size

_draw = random.SystemRandom()  # the script's own random numbers stay as they are
_hooks: list[Any] = []  # of one forward pass
_last: Flip | None = None  # the last fault that was logged: a defective unit strikes often


# ---------------------------------------------------------------- the places
def before_forward(module: torch.nn.Module) -> None:
    """Let a fault strike in the coming forward pass of this module."""
    flip = injector.flip_due("forward")
    if flip is None:
        return
    innermost = [each for each in module.modules() if not any(True for _ in each.children())]
    _clear_hooks()

    def strike_output(which: torch.nn.Module, arguments: Any, output: Any) -> None:
        outputs = [each for each in _flat(output) if each.is_floating_point()]
        if _hooks and strike(flip, [(f"the output of {type(which).__name__}", each) for each in outputs[:1]]):
            _clear_hooks()

    # From the middle on: not every module of a model is called.
    for each in [*innermost[len(innermost) // 2 :], module]:
        _hooks.append(each.register_forward_hook(strike_output))


def _clear_hooks() -> None:
    while _hooks:
        _hooks.pop().remove()


def after_backward(gradients: Callable[[], Iterable[Entry]]) -> None:
    """Let a fault strike in a gradient. gradients(): those that no reduce has begun to overwrite."""
    if (flip := injector.flip_due("gradient")) is not None:
        strike(flip, gradients())


def before_reduce(own_sum: torch.Tensor) -> None:
    """Let a fault strike in a sum that this rank sends now. The copy that undoes the reduce is taken already."""
    if (flip := injector.flip_due("wire")) is not None:
        strike(flip, [("what is sent into the sum", own_sum)])


def at_boundary(model: Sequence[Any], optimizer: Any) -> None:
    """Let a fault strike in the parameters and in the optimizer's state."""
    if (flip := injector.flip_due("weight")) is not None:
        strike(flip, ((name, each.data) for chunk in model for name, each in chunk.module.named_parameters()))
    if (flip := injector.flip_due("moment")) is not None:
        strike(flip, _moments(optimizer))


def _moments(optimizer: Any) -> Iterator[Entry]:
    for each in getattr(optimizer, "chained_optimizers", [optimizer]):
        for values in getattr(each, "optimizer", each).state.values():
            for key, value in values.items():
                if isinstance(value, torch.Tensor) and value.numel() > 1:  # otherwise it is a count of steps
                    yield key, value


def _flat(output: Any) -> Iterator[torch.Tensor]:
    if isinstance(output, torch.Tensor):
        yield output
    elif isinstance(output, Sequence) and not isinstance(output, str):
        for each in output:
            yield from _flat(each)


# ---------------------------------------------------------------- one number
def strike(flip: Flip, named: Iterable[Entry]) -> bool:
    """Change the largest number of a random one of the tensors in place, and return True; False if there is none."""
    global _last
    chosen = _choose(named)
    if chosen is None:
        return False
    name, tensor, place = chosen
    injector.flip_done(flip)
    bit = flip.bit_of(8 * tensor.element_size())
    if bit is None:
        warn(f"no bit {flip.bit} in {tensor.dtype}: nothing flipped in {name} [injected]")
        return True
    before = float(tensor[place])
    if flip.nan:
        tensor[place] = math.nan
    else:
        flip_bit(tensor, place, bit)
    if _last is not flip:
        _last = flip
        what = "set to NaN" if flip.nan else f"flipped bit {bit}"
        inform(f"{what} in {name}, element {list(place)}: {before} is {float(tensor[place])} now [injected]")
    return True


def _choose(named: Iterable[Entry]) -> tuple[str, torch.Tensor, tuple[int, ...]] | None:
    """Return (name, tensor, place of its largest number) of a random tensor; of zeros only if there are no others."""
    found = [(name, part) for name, each in named if (part := local(each)).is_floating_point() and part.numel()]
    _draw.shuffle(found)
    zeros = None
    for name, part in found:
        values = part.data  # has a version of its own, which autograd does not check
        place = _place(int(values.abs().float().reshape(-1).argmax()), values.shape)
        if values[place] != 0:
            return name, values, place
        zeros = name, values, place
    return zeros


def _place(number: int, shape: Sequence[int]) -> tuple[int, ...]:
    place: list[int] = []
    for size in reversed(shape):
        number, at = divmod(number, size)
        place.append(at)
    return tuple(reversed(place))


def flip_bit(tensor: torch.Tensor, place: tuple[int, ...], bit: int) -> None:
    """Flip a bit (0 is the lowest) of one number, on its own device."""
    width = 8 * tensor.element_size()
    mask = 1 << bit
    if bit == width - 1 and width > 8:  # the sign of the integer type
        mask -= 1 << width
    with torch.no_grad():
        tensor.view(INTEGERS[tensor.element_size()])[place].bitwise_xor_(mask)
