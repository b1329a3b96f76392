"""Placeholders in a rank's command and variables, for numbers that are known only when its process starts."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

_PLACEHOLDER = re.compile(r"\{unicron:([A-Z_]+)\}")


def placeholder(variable: str) -> str:
    """Return the text that stands for the value of a rank's variable, such as LOCAL_RANK."""
    return f"{{unicron:{variable}}}"


def fill(text: str, environment: Mapping[str, str]) -> str:
    """Return the text with its placeholders replaced."""
    if "{unicron:" not in text:
        return text
    return _PLACEHOLDER.sub(lambda found: environment.get(found[1], ""), text)


def fill_words(words: Sequence[str], environment: Mapping[str, str]) -> list[str]:
    """Return a command with its placeholders replaced."""
    return [fill(word, environment) for word in words]


def fill_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return an environment whose values refer to its own variables, replaced by them."""
    return {name: fill(value, environment) for name, value in environment.items()}
