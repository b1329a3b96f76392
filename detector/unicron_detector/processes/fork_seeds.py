"""Random numbers of forked ranks: what a new process draws from the system, unless an import has chosen a seed
(docs/design/warm-processes.md). The zygote runs it by its path: the standard library only."""

from __future__ import annotations

import contextlib
import functools
import random
import sys
from collections.abc import Callable, Iterator
from typing import Any

LARGE_SEED = 1 << 32  # torch draws 64 bits; what people choose is smaller


class Seeds:
    """Python's own generator does not tell whether it was seeded, and is seeded anew after each fork: so what imports
    choose for it is noted while they run."""

    def __init__(self) -> None:
        self._chosen = False
        self._state: tuple[Any, ...] | None = None

    @contextlib.contextmanager
    def note_choices(self) -> Iterator[None]:
        """Notes, while the imports run, whether one of them chooses a seed."""
        calls = {name: getattr(random, name) for name in ("seed", "setstate")}
        for name, call in calls.items():
            setattr(random, name, self._noting(call))
        try:
            yield
        finally:
            for name, call in calls.items():
                setattr(random, name, call)
            self._state = random.getstate() if self._chosen else None

    def _noting(self, call: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(call)
        def noting(*arguments: Any, **more: Any) -> None:
            call(*arguments, **more)
            self._chosen = (arguments[0] if arguments else more.get("a")) is not None  # else it draws from the system

        return noting

    def renew(self) -> None:
        """Draw new random numbers in the fork."""
        if self._state is not None:
            random.setstate(self._state)
        numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
        if numpy is not None and "numpy.random" in sys.modules:
            if getattr(numpy.random.mtrand._rand._bit_generator, "_seed_seq", None) is not None:
                numpy.random.seed()
        if torch is not None and torch.default_generator.initial_seed() >= LARGE_SEED:
            torch.default_generator.seed()
