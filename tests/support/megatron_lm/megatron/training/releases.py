"""Of the stand-in: how the real one's functions differ with the release."""

import functools
import inspect

import megatron.core

RELEASE = tuple(map(int, megatron.core.__version__.split(".")[:2]))
SINCE_18 = RELEASE >= (0, 18)


def takes_more(since):
    """since: the first release -> parameters that the real function takes from it on, and this one has no use for."""
    more = [
        name for first, names in since.items() if tuple(map(int, first.split("."))) <= RELEASE for name in names.split()
    ]

    def take(function):
        @functools.wraps(function)
        def taking(*arguments, **keywords):
            return function(*arguments, **{name: value for name, value in keywords.items() if name not in more})

        known = inspect.signature(function)
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        taking.__signature__ = known.replace(
            parameters=[*known.parameters.values(), *(inspect.Parameter(name, kind, default=None) for name in more)]
        )
        return taking

    return take
