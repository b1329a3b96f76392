"""Takes secrets out of a text by their values, in each form in which a text may have them."""

from __future__ import annotations

import base64
import json
import re
import urllib.parse
from collections.abc import Collection, Mapping

REPLACEMENT = "***"
SHORTEST = 6  # characters of a value that is looked for everywhere: shorter ones are words, too
_SECRET_NAME = re.compile(
    r"(?i)token|passw|passphrase|passcode|secret|credential|cookie|webhook|jwt|(^|_)(key|pass|pwd|pw|auth|psk|dsn)$"
)


def secret_values(environment: Mapping[str, str]) -> list[str]:
    """Return the values of the variables whose names say that they are secrets."""
    return [
        value
        for name, value in environment.items()
        if len(value) >= SHORTEST and name not in ("PWD", "OLDPWD") and _SECRET_NAME.search(name)
    ]


def without_values(text: str, secrets: Collection[str], shortest: int = SHORTEST) -> str:
    """Return the text with REPLACEMENT for each secret of at least so many characters."""
    forms = {form for value in secrets if len(value) >= shortest for form in _forms(value, shortest)}
    for form in sorted(forms, key=len, reverse=True):
        text = text.replace(form, REPLACEMENT)
    return text


def _forms(value: str, shortest: int) -> list[str]:
    """Return the value as plain text, JSON, URLs and base64 write it."""
    data = value.encode(errors="replace")
    forms = [value, json.dumps(value)[1:-1], urllib.parse.quote(value, safe=""), urllib.parse.quote_plus(value)]
    for before in range(3):  # base64 of a text that holds it: what its neighbours do not change
        whole = base64.b64encode(bytes(before) + data).decode()
        forms.append(whole[(0, 2, 3)[before] : len(whole) - (0, 3, 2)[(before + len(data)) % 3]])
    return [form for form in forms if len(form) >= shortest]
