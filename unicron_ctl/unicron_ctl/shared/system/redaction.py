"""Takes secrets out of a text by their values, in each form in which a text may contain them."""

from __future__ import annotations

import base64
import json
import re
import urllib.parse
from collections.abc import Collection, Mapping

REPLACEMENT = "***"
SHORTEST = 6  # characters of a value that is searched for everywhere: shorter ones may be words
_SECRET_NAME = re.compile(
    r"(?i)token|passw|passphrase|passcode|secret|credential|cookie|webhook|jwt|(^|_)(key|pass|pwd|pw|auth|psk|dsn)$"
)


def secret_values(environment: Mapping[str, str]) -> list[str]:
    """Return the values of the variables whose names mark them as secrets."""
    return [
        value
        for name, value in environment.items()
        if len(value) >= SHORTEST and name not in ("PWD", "OLDPWD") and _SECRET_NAME.search(name)
    ]


def without_values(text: str, secrets: Collection[str], shortest: int = SHORTEST) -> str:
    """Return the text with REPLACEMENT for each secret of at least `shortest` characters."""
    forms = {form for value in secrets if len(value) >= shortest for form in _forms(value, shortest)}
    for form in sorted(forms, key=len, reverse=True):
        text = text.replace(form, REPLACEMENT)
    return text


def _forms(value: str, shortest: int) -> list[str]:
    """Return the value as it stands in plain text, JSON, URLs and base64."""
    data = value.encode(errors="replace")
    forms = [value, json.dumps(value)[1:-1], urllib.parse.quote(value, safe=""), urllib.parse.quote_plus(value)]
    for before in range(3):  # base64 of a longer text: the part that does not depend on what surrounds the value
        whole = base64.b64encode(bytes(before) + data).decode()
        forms.append(whole[(0, 2, 3)[before] : len(whole) - (0, 3, 2)[(before + len(data)) % 3]])
    return [form for form in forms if len(form) >= shortest]
