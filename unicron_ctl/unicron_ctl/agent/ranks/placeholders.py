"""Words and variables of a rank's process that hold a number which is known only when the process starts."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

_PLACEHOLDER = re.compile(r"\{unicron:([A-Z_]+)\}")


def placeholder(variable: str) -> str:
    """Return the text that stands for the value of one of the rank's variables, such as LOCAL_RANK."""
    return f"{{unicron:{variable}}}"


def fill(text: str, environment: Mapping[str, str]) -> str:
    """Return the text with the values in place of the placeholders."""
    if "{unicron:" not in text:
        return text
    return _PLACEHOLDER.sub(lambda found: environment.get(found[1], ""), text)


def fill_words(words: Sequence[str], environment: Mapping[str, str]) -> list[str]:
    """Return a command with the values in place of the placeholders."""
    return [fill(word, environment) for word in words]


def fill_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return an environment whose values refer to its own variables."""
    return {name: fill(value, environment) for name, value in environment.items()}
