"""Severities, causes and the rules that lead to them.

The knowledge itself is data: ``severity_table.toml`` beside this module. Standard library only: ranks import it.
SEV1: isolate the node. SEV2: restart the process. SEV3: reattempt in place (docs/design/paper.md, section 3).
"""

from __future__ import annotations

import enum
import functools
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from unicron_detector.failures.prefilter import Alternative, Prefilter, alternatives, bound_repeats

TABLE_PATH = Path(__file__).with_name("severity_table.toml")


class Severity(enum.IntEnum):
    """The severity of a fault; the smaller the worse."""

    SEV1 = 1
    SEV2 = 2
    SEV3 = 3


# "report" stands beside the three: an event worth a line in the log that must not disturb a training job.
ACTIONS = {Severity.SEV1: "isolate", Severity.SEV2: "restart", Severity.SEV3: "reattempt"}
REPORT = "report"
# Whose fault a cause is by nature: escalation treats them differently (see unicron_detector.failures.escalation).
SCOPES = ("hardware", "network", "application", "storage", "unknown", "none")
KINDS = ("text", "xid", "exit", "signal", "slurm")


class SeverityTableError(ValueError):
    """A wrong rule of the table or of the admin's extension; one line that names it and what to do."""


# Patterns are matched in lower case without IGNORECASE, which is several times faster, because the engine then skips to
# the next possible first letter. Patterns with unusual escapes keep IGNORECASE.
_SIMPLE = re.compile(r"(?:[^\\]|\\[dDsSwWbBnrt.()\[\]{}|+*?^$/\\\-'\"#:=<>,])*", re.DOTALL)
_ESCAPE_OR_CAPITAL = re.compile(r"\\.|[A-Z]", re.DOTALL)


def _folded_pattern(pattern: str) -> str:
    if not _SIMPLE.fullmatch(pattern):
        return bound_repeats(pattern)
    return _ESCAPE_OR_CAPITAL.sub(
        lambda hit: hit.group(0) if len(hit.group(0)) == 2 else hit.group(0).lower(), bound_repeats(pattern)
    )


def fold_case(text: str) -> str:
    """Return the text in lower case with the same length, so that positions in it are positions in the text."""
    lower = text.lower()
    if len(lower) == len(text):
        return lower
    return "".join(char.lower() if len(char.lower()) == 1 else char for char in text)


@dataclass(frozen=True)
class Cause:
    """A named cause with its severity."""

    name: str
    severity: Severity
    scope: str = "unknown"
    title: str = ""
    method: str = "exception"  # the detection method that usually sees it (docs/design/paper.md, section 3)
    paper: str = ""  # the row of docs/design/paper.md (sections 1 and 3) that it stands for, if any
    action: str = ""  # only "report" differs from the severity's own action

    @property
    def first_action(self) -> str:
        return self.action or ACTIONS[self.severity]


@dataclass(frozen=True)
class Rule:
    """One line of the table: what is seen -> cause. Text rules are tried in table order, the first match wins."""

    id: str
    kind: str
    cause: str
    pattern: str = ""
    codes: tuple[int, ...] = ()
    names: tuple[str, ...] = ()
    why: str = ""
    source: str = ""
    of_admin: bool = False
    only_from: tuple[str, ...] = ()  # sources of text in which the rule holds; empty: all
    severity: Severity | None = None
    action: str = ""
    generic: bool = False  # says only that there was an error; see Classifier.match
    weak: bool = False  # a guess by a few words; see Classifier.text
    hardware: bool = False  # in an application's text, counts only if a library speaks; see failures.speakers

    @functools.cached_property
    def regex(self) -> re.Pattern[str]:
        """The compiled pattern, for text that went through ``fold_case``."""
        return re.compile(_folded_pattern(self.pattern), self._flags)

    @functools.cached_property
    def alternatives(self) -> tuple[Alternative, ...]:
        """The parts of the regex, for the prefilter."""
        return alternatives(_folded_pattern(self.pattern), self._flags)

    @property
    def _flags(self) -> int:
        return 0 if _SIMPLE.fullmatch(self.pattern) else re.IGNORECASE


@dataclass(frozen=True)
class Verdict:
    """The meaning of a signal."""

    cause: str
    severity: Severity
    action: str
    reason: str  # a sentence for people
    rule: str  # the id of the table's row that decided
    scope: str = "unknown"


@dataclass(frozen=True)
class Table:
    """Causes by name and rules in order of precedence."""

    causes: Mapping[str, Cause]
    rules: tuple[Rule, ...]
    default: str = "other_software_error"
    _by_kind: Mapping[str, tuple[Rule, ...]] = field(init=False, repr=False, compare=False)
    _prefilter: Prefilter = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        by_kind = {kind: tuple(rule for rule in self.rules if rule.kind == kind) for kind in KINDS}
        object.__setattr__(self, "_by_kind", by_kind)
        object.__setattr__(self, "_prefilter", Prefilter([rule.alternatives for rule in by_kind["text"]]))

    def of_kind(self, kind: str) -> tuple[Rule, ...]:
        return self._by_kind[kind]

    def candidates(self, low: str) -> dict[int, list[Alternative]]:
        """Return the text rules that may match a lower-case text: each one's place in the table, and its alternatives.

        No pattern matches an empty text.
        """
        return self._prefilter.candidates(low) if low else {}

    def with_rules(self, rules: Iterable[Mapping[str, object]], causes: Iterable[Mapping[str, object]] = ()) -> Table:
        """Return a table in which these rules precede the present ones, so that an admin's word wins.

        Raises SeverityTableError if a rule cannot be used.
        """
        all_causes = dict(self.causes)
        for raw in causes:
            cause = parse_cause(raw)
            all_causes[cause.name] = cause
        parsed = (parse_rule(raw, all_causes) for raw in rules)
        added = [replace(rule, id=rule.id or f"admin-{n}", of_admin=True) for n, rule in enumerate(parsed, 1)]
        taken = {rule.id for rule in added}
        kept = tuple(rule for rule in self.rules if rule.id not in taken)
        return replace(self, causes=all_causes, rules=(*added, *kept))


def _fail(where: str, what: str) -> SeverityTableError:
    return SeverityTableError(f"severity table: {where}: {what}")


_LISTS: dict[str, type] = {"codes": int, "names": str, "only_from": str}


def _values(raw: Mapping[str, object], kind: type[Cause] | type[Rule], where: str) -> dict[str, Any]:
    allowed = sorted(each.name for each in fields(kind) if each.name != "of_admin")
    if unknown := sorted(set(raw) - set(allowed)):
        raise _fail(where, f"unknown key {unknown[0]!r}; use one of {', '.join(allowed)}")
    return {key: _value(key, value, where) for key, value in raw.items()}


def _value(key: str, value: object, where: str) -> object:
    if key in ("generic", "weak", "hardware"):
        return value is True
    if key == "severity":
        if isinstance(value, bool) or not isinstance(value, int) or value not in (1, 2, 3):
            raise _fail(where, f"severity must be 1, 2 or 3, not {value!r}")
        return Severity(value)
    if kind := _LISTS.get(key):
        if not isinstance(value, list) or any(not isinstance(item, kind) or isinstance(item, bool) for item in value):
            raise _fail(where, f"{key} must be a list of {kind.__name__}, not {value!r}")
        return tuple(value)
    if not isinstance(value, str):
        raise _fail(where, f"{key} must be text, not {value!r}")
    if key == "action" and value not in ("", REPORT):
        raise _fail(where, f'action may only be "{REPORT}" (the others follow from the severity), not {value!r}')
    return value


def parse_cause(raw: Mapping[str, object]) -> Cause:
    """Parse a [[cause]] of the table or of ``[[severity.cause]]``. Raises SeverityTableError."""
    where = f"cause {raw.get('name') or '(no name)'}"
    values = {key: value for key, value in _values(raw, Cause, where).items() if value != ""}
    if not re.fullmatch(r"[a-z][a-z0-9_]*", values.get("name", "")):
        raise _fail(where, "name must be lower case letters, digits and _")
    if "severity" not in values:
        raise _fail(where, "severity must be 1, 2 or 3")
    cause = Cause(**{"title": values["name"].replace("_", " "), **values})
    if cause.scope not in SCOPES:
        raise _fail(where, f"scope must be one of {', '.join(SCOPES)}, not {cause.scope!r}")
    return cause


def parse_rule(raw: Mapping[str, object], causes: Mapping[str, Cause], tested: bool = False) -> Rule:
    """Parse a [[rule]] of the table or of ``[[severity.rule]]``. Raises SeverityTableError."""
    if not isinstance(raw, Mapping):
        raise _fail("rule", f"must be a table, not {raw!r}")
    where = f"rule {raw.get('id') or raw.get('pattern') or '(no id)'}"
    values = {key: value for key, value in _values(raw, Rule, where).items() if value != ""}
    rule = Rule(**{"id": "", "kind": "text", "cause": "", **values})
    if rule.kind not in KINDS:
        raise _fail(where, f"kind must be one of {', '.join(KINDS)}, not {rule.kind!r}")
    if rule.cause not in causes:
        raise _fail(where, f"unknown cause {rule.cause!r}; add a [[severity.cause]] with that name or use a known one")
    if not tested:
        _check_rule(rule, where)
    return rule


def _check_rule(rule: Rule, where: str) -> None:
    if rule.kind == "text":
        if not rule.pattern:
            raise _fail(where, "a text rule needs a pattern")
        try:
            matches_nothing = rule.regex.search("")
        except re.error as error:
            raise _fail(where, f"pattern is not a regular expression: {error}") from None
        if matches_nothing:
            raise _fail(where, "pattern matches an empty line, so it would match everything")
    elif rule.kind in ("xid", "exit") and not rule.codes:
        raise _fail(where, f"a rule of kind {rule.kind} needs codes = [numbers]")
    elif rule.kind in ("signal", "slurm") and not rule.names:
        raise _fail(where, f"a rule of kind {rule.kind} needs names = [texts]")


def load_table(path: Path | str = TABLE_PATH, tested: bool = False) -> Table:
    """Read a table file. Raises SeverityTableError, or OSError if the file cannot be read.

    tested: the patterns are known to be right, and are compiled when a text needs them.
    """
    with open(path, "rb") as file:
        try:
            raw = tomllib.load(file)
        except tomllib.TOMLDecodeError as error:
            raise _fail(str(path), f"not TOML: {error}") from None
    causes: dict[str, Cause] = {}
    for entry in raw.get("cause", []):
        cause = parse_cause(entry)
        if cause.name in causes:
            raise _fail(f"cause {cause.name}", "is there twice")
        causes[cause.name] = cause
    rules = tuple(parse_rule(entry, causes, tested) for entry in raw.get("rule", []))
    ids = [rule.id for rule in rules]
    doubles = sorted({name for name in ids if not name or ids.count(name) > 1})
    if doubles:
        raise _fail(f"rule {doubles[0] or '(no id)'}", "every rule needs an id of its own")
    default = raw.get("default", "other_software_error")
    if default not in causes:
        raise _fail("default", f"unknown cause {default!r}")
    return Table(causes=causes, rules=rules, default=default)


@functools.cache
def default_table() -> Table:
    """Return the shipped table, read once per process."""
    return load_table(tested=True)
