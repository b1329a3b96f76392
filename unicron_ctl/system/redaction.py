"""Takes secrets out of text that leaves the cluster: by the names before them, by their forms, and by their values.

It cannot know every secret: whoever sends a text looks through it first.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

TAKEN_OUT = "***"
LEAST = 6  # characters of a value that is looked for everywhere: shorter ones are words, too
# Bounded: whoever writes long words into a log must not keep its reader busy.
_NAME = (
    r"[\w.-]{0,100}(?:passw(?:or)?d|passwd|passphrase|secret|token|api[_-]?key|access[_-]?key|private[_-]?key|public[_-]?key|peer[_-]?key"
    r"|secret[_-]?key|credential|authorization|cookie|webhook|(?<![a-z])slack(?![a-z])|(?<![a-z])auth[_-]?key|_pwd(?![a-z])|_pass(?![a-z])|sshpass(?![a-z])"
    r")[\w.-]{0,100}"
)
_SECRET_NAME = re.compile(rf"(?i)\A{_NAME}\Z|(?i:_key)\Z|(?i:\Akey)\Z")
_VALUE = r"\\\"(?:(?!\\\")[^\n])*\\\"|\"(?:[^\"\\\n]|\\.)*\"|'(?:[^'\\\n]|\\.)*'|[^\s,;\"'}\])]+"

_FORMS = (
    # A private key, whole.
    (
        re.compile(
            r"-----BEGIN [A-Z ]{0,30}PRIVATE KEY-----.*?(?:-----END [A-Z ]{0,30}PRIVATE KEY-----|\Z)", re.DOTALL
        ),
        TAKEN_OUT,
    ),
    # NAME=value, "name": "value", name = "value", --name value.
    (re.compile(r"(?i)(\bauthorization[\"']?\s*[:=]\s*[\"']?(?:bearer|basic)\s+)[^\s\"']+"), rf"\1{TAKEN_OUT}"),
    (
        re.compile(rf"(?i)(?<![\w.-])((?:\\?[\"'])?{_NAME}(?:\\?[\"'])?\s*(?:=>|[:=])\s*)(?:{_VALUE})"),
        rf"\1{TAKEN_OUT}",
    ),
    (re.compile(rf"(?i)((?<!\S)--{_NAME}\s+)(?!-)(?:{_VALUE})"), rf"\1{TAKEN_OUT}"),
    (re.compile(r"(\b[A-Z][A-Z0-9_]*_KEY[\"']?\s*[:=]\s*)(?:" + _VALUE + ")"), rf"\1{TAKEN_OUT}"),
    (re.compile(r"(?i)(\b(?:bearer|password|passwd)\s+)[^\s\"',;]{6,}"), rf"\1{TAKEN_OUT}"),
    # URLs: user and password, the query, and all of a webhook's path.
    (re.compile(r"(?i)(\b[a-z][a-z0-9+.-]{0,20}://)[^\s/@\"']+@"), rf"\1{TAKEN_OUT}@"),
    (
        re.compile(r"(?i)(https?://[^\s/\"'<>]{0,200}(?:hook|discord|office|zapier|teams)[^\s/\"'<>]*/)[^\s\"'<>]+"),
        rf"\1{TAKEN_OUT}",
    ),
    (re.compile(r"(?i)(https?://[^\s\"'<>]{0,300}/(?:web)?hooks?/)[^\s\"'<>]+"), rf"\1{TAKEN_OUT}"),
    (re.compile(r"(https?://[^\s\"'<>?]{1,500}\?)[^\s\"'<>]+"), rf"\1{TAKEN_OUT}"),
    # What is a secret by its form.
    (re.compile(r"\bMUNGE:[A-Za-z0-9+/=]+:?"), TAKEN_OUT),
    (re.compile(r"\beyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*"), TAKEN_OUT),
    (re.compile(r"\b(?:AKIA|ASIA)[0-9A-Z]{16}\b"), TAKEN_OUT),
    (re.compile(r"\b(?:gh[pousr]_|github_pat_|glpat-|hf_|sk-|xox[abeprs]-|xapp-|npm_|pypi-)[\w-]{16,}"), TAKEN_OUT),
    # A key of CURVE: 40 characters of Z85; and long words of letters of both cases and digits.
    (
        re.compile(
            r"(?<=[\"'\s=])(?=[^\s\"'/]{0,39}[!^*?&<>()\[\]{}@%$#])[\w.:+=^!*?&<>()\[\]{}@%$#-]{40}(?=[\"'\s]|\Z)"
        ),
        TAKEN_OUT,
    ),
    (
        re.compile(
            r"(?<![\w/.+-])(?=[\w+/=-]{0,200}[a-z])(?=[\w+/=-]{0,200}[A-Z])(?=[\w+/=-]{0,200}\d)[A-Za-z0-9+_=-]{28,}(?![\w/.-])"
        ),
        TAKEN_OUT,
    ),
)


def is_secret_name(name: str) -> bool:
    """Whether the value of a variable of this name is a secret."""
    return bool(_SECRET_NAME.search(name))


def secret_values(environment: Mapping[str, str]) -> list[str]:
    """The values of the variables whose names say that they are secrets."""
    return [value for name, value in environment.items() if is_secret_name(name) and len(value) >= LEAST]


def redacted(data: Any, known: Collection[str] = ()) -> Any:
    """Plain data with all its texts without secrets, and nothing below a name that says it is one."""
    if isinstance(data, str):
        return without_secrets(data, known)
    if isinstance(data, list):
        return [redacted(one, known) for one in data]
    if isinstance(data, dict):
        return {
            name: TAKEN_OUT
            if isinstance(value, str) and value and is_secret_name(str(name))
            else redacted(value, known)
            for name, value in data.items()
        }
    return data


def without_secrets(text: str, known: Collection[str] = (), least: int = LEAST) -> str:
    """The text with TAKEN_OUT in place of what is, or looks like, a secret. known: secrets, wherever they stand, of at
    least so many characters."""
    for value in sorted(known, key=len, reverse=True):
        if len(value) >= least:
            text = text.replace(value, TAKEN_OUT)
    for form, instead in _FORMS:
        text = form.sub(instead, text)
    return text
