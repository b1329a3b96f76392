"""Defines `[notify]` of unicron.toml: the targets for notices about what needs an admin, healed jobs and left nodes.

Only unicrond reads it. Secrets are in a file of their own that nobody else can read.
"""

from __future__ import annotations

import os
import tomllib
import urllib.parse
from typing import Annotated, Literal

import msgspec

from unicron_ctl.shared.settings.limits import Range
from unicron_ctl.shared.system.addresses import is_loopback, split
from unicron_ctl.shared.system.errors import UserError
from unicron_ctl.shared.system.plain_file import open_plain
from unicron_detector.health.programs import why_untrusted

NoticeKind = Literal["admin", "healed", "left"]


class NotifyConfig(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The section [notify]: who gets which notices. By default there are none."""

    hook: str = ""
    """A program that is told by JSON on its standard input: an absolute path. Root or unicrond's user owns it, and
    nobody else can write it."""
    mail: list[str] = []
    """The addresses that get mail."""
    mail_from: str = ""
    """The sender; by default unicron@HOST."""
    smtp: str = "localhost:25"
    """The mail server: HOST:PORT. With a user in `secrets`, or at port 587, the connection is encrypted (STARTTLS)."""
    secrets: str = ""
    """A TOML file of mode 0600: slack, webhook (URLs), webhook_token, smtp_user, smtp_password."""
    kinds: tuple[NoticeKind, ...] = ("admin", "healed", "left")
    """The kinds of notices: what needs an admin, jobs that were healed, nodes that were left."""
    digest_seconds: Annotated[float, Range(0.0, 86400.0)] = 30.0
    """That a notice waits for others, which go with it."""
    most_per_hour: Annotated[int, Range(1, 3600)] = 12
    """Messages that each target gets; what is more waits for the next."""
    timeout: Annotated[float, Range(0.1, 300.0)] = 20.0
    """For the hook to end, or a server to answer. No decision waits for it."""


class Secrets(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The contents of the file of `secrets`."""

    slack: str = ""
    webhook: str = ""
    webhook_token: str = ""
    smtp_user: str = ""
    smtp_password: str = ""

    @property
    def words(self) -> list[str]:
        """All secrets, which must never be in a log."""
        return [word for word in msgspec.structs.astuple(self) if word]


def wrong_targets(config: NotifyConfig) -> dict[str, str]:
    """Return the problems of the section itself: by the key of each target, in one line each."""
    problems = {"mail": _mail_problem(config)}
    for key in ("hook", "secrets"):
        if (path := getattr(config, key)) and not os.path.isabs(path):
            problems[key] = f'{key} = "{path}": write an absolute path'
    return {key: problem for key, problem in problems.items() if problem}


def _mail_problem(config: NotifyConfig) -> str:
    odd = next((one for one in [*config.mail, config.mail_from] if one and not _is_mail(one)), "")
    if odd:
        return f'"{odd}" is no address of mail'
    try:
        split(config.smtp)
    except ValueError:
        return f'smtp = "{config.smtp}": write HOST:PORT' if config.mail else ""
    return ""


def _is_mail(text: str) -> bool:
    name, _, host = text.rpartition("@")
    return bool(name and host) and text.isprintable() and not set(text) & set(' ,;<>"')


def notify_problems(config: NotifyConfig) -> list[str]:
    """Return the problems of the hook and the secrets on this machine, in one line each; for unicrond."""
    wrong = wrong_targets(config)
    problems = [unfit(config.hook)] if config.hook and "hook" not in wrong else []
    try:
        if "secrets" not in wrong:
            load_secrets(config)
    except UserError as error:
        problems.append(str(error))
    return [f"[notify] {line}" for line in problems if line]


def usable(config: NotifyConfig) -> tuple[NotifyConfig, Secrets, bool]:
    """Return the section without its wrong parts, the secrets, and whether those could be read. Without them only the
    hook is left, because they may protect the mail on its way."""
    wrong = wrong_targets(config)
    left_out: dict[str, object] = {"hook": ""} if "hook" in wrong else {}
    for field in msgspec.structs.fields(NotifyConfig):
        limits = [note for note in getattr(field.type, "__metadata__", ()) if isinstance(note, Range)]
        if any(limit.problem(field.name, getattr(config, field.name)) for limit in limits):
            left_out[field.name] = field.default
    secrets, read = Secrets(), True
    try:
        secrets = load_secrets(config)
    except UserError:
        read = False
    if "mail" in wrong or not read:
        left_out["mail"] = []
    return msgspec.structs.replace(config, **left_out), secrets, read


def unfit(hook: str) -> str:
    """Return why the hook must not be run, or ""."""
    return f'hook = "{hook}": {why}' if (why := why_untrusted(hook)) else ""


def load_secrets(config: NotifyConfig) -> Secrets:
    """Read the file of secrets that the section names, if any. Raises UserError, whose text has no secrets."""
    path = config.secrets
    if not path:
        return Secrets()
    if why := wrong_targets(config).get("secrets"):
        raise UserError(why)
    try:
        with open_plain(path) as file:
            status = os.fstat(file.fileno())  # of this file, wherever the path leads by now
            if status.st_mode & 0o077 or status.st_uid not in (0, os.geteuid()):
                raise UserError(
                    f"{path}: others can read it, or own it: `chown` it to unicrond's user and `chmod 600 {path}`"
                )
            secrets = msgspec.convert(tomllib.load(file), Secrets)
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError):
        raise UserError(f"{path}: not TOML") from None
    except msgspec.ValidationError as error:
        keys = ", ".join(Secrets.__struct_fields__)
        raise UserError(f"{path}: {str(error).partition(' - ')[0]}: its keys are {keys}") from None
    for name in ("slack", "webhook"):
        if (url := getattr(secrets, name)) and not _is_safe(url):
            raise UserError(f"{path}: {name} has to be an https:// URL")
    return secrets


def _is_safe(url: str) -> bool:
    """Whether nobody on the way can read data sent to this URL."""
    try:
        parts = urllib.parse.urlsplit(url)
    except ValueError:  # its text may quote the URL
        return False
    host = parts.hostname or ""
    return (parts.scheme == "https" and bool(host)) or (parts.scheme == "http" and is_loopback(host))
