"""Sends a message to a target of [notify]: a hook program, mail, Slack, a webhook. It may take long.

A separate program sends it, which can be killed whatever it waits for: the hook, or for the others this module
(``python -m unicron_ctl.shared.notices.notify_targets``, with an :class:`Order` on its standard input). Only that
program loads the modules for mail and HTTP.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import msgspec

from unicron_ctl.shared.notices.notices import Message
from unicron_ctl.shared.settings.notify import NotifyConfig, Secrets, unfit
from unicron_ctl.shared.system.addresses import split
from unicron_ctl.shared.system.errors import one_line, shorten
from unicron_ctl.shared.system.printable import print_text
from unicron_ctl.shared.system.redaction import without_values

SUBMISSION = 587  # the port for mail submission, always encrypted
MOST_CHARACTERS = 300  # of an error
WHOLE = 5.0  # times the section's time limit: for all answers of a server together
PROGRAM = (sys.executable, "-P", "-m", "unicron_ctl.shared.notices.notify_targets")
Deliver = Callable[[Message], None]


class NotTold(Exception):
    """A target did not get the message; the text says why, without secrets."""


def targets(config: NotifyConfig, secrets: Secrets, hooks: Hooks) -> dict[str, Deliver]:
    """Return by target: a function that sends to it within :data:`WHOLE` times the section's time limit, or raises
    NotTold."""
    deliveries: dict[str, Deliver] = {}
    if config.hook:
        deliveries["hook"] = partial(hooks.run, config.hook, config.timeout)
    for name, wanted in (("mail", config.mail), ("slack", secrets.slack), ("webhook", secrets.webhook)):
        if wanted:
            deliveries[name] = partial(hooks.send, name, config, secrets)
    return {name: partial(_without_secrets, deliver, secrets.words) for name, deliver in deliveries.items()}


def _without_secrets(deliver: Deliver, words: list[str], message: Message) -> None:
    try:
        deliver(message)
    except Exception as error:
        raise NotTold(shorten(without_values(_reason(error), words, 1), MOST_CHARACTERS)) from None


def _reason(error: Exception) -> str:
    return one_line(f"{error}" if isinstance(error, NotTold) else f"{type(error).__name__}: {error}")


class Order(msgspec.Struct, kw_only=True):
    """A message for this module's own program to send."""

    target: str
    message: Message
    config: NotifyConfig
    secrets: Secrets


class Hooks:
    """Runs the programs. None of them outlives the controller."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running = set[subprocess.Popen[bytes]]()
        self._closed = False

    def run(self, path: str, seconds: float, message: Message) -> None:
        """Run the hook without a shell, with the message as JSON on its standard input and a minimal environment.
        Raises NotTold."""
        if why := unfit(path):
            raise NotTold(why)
        environment = {"PATH": "/usr/local/bin:/usr/bin:/bin:/usr/local/sbin:/usr/sbin:/sbin", "LC_ALL": "C.UTF-8"}
        data = json.dumps({"subject": message.subject, **message.data}).encode()
        try:
            status, _ = self._play([path], environment, data, seconds)
        except subprocess.TimeoutExpired:
            raise NotTold(f"the hook did not end within {seconds:g} s and was killed") from None
        if status:
            raise NotTold(f"the hook ended with status {status}")

    def send(self, name: str, config: NotifyConfig, secrets: Secrets, message: Message) -> None:
        """Send the message to a server. Each byte restarts the time limit of a socket, so the program has a limit of
        its own. Raises NotTold."""
        data = msgspec.json.encode(Order(target=name, message=message, config=config, secrets=secrets))
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        limit = WHOLE * config.timeout
        try:
            status, errors = self._play(PROGRAM, environment, data, limit, subprocess.PIPE)
        except subprocess.TimeoutExpired:
            raise NotTold(f"the server was not through within {limit:g} s") from None
        if status:
            raise NotTold("".join(errors.splitlines()[-1:]) or f"the program ended with status {status}")

    def _play(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        data: bytes,
        seconds: float,
        errors: int = subprocess.DEVNULL,
    ) -> tuple[int, str]:
        """Run a program; return its status, and its errors if they are piped. If it takes too long, it is killed with
        all its children. Raises TimeoutExpired."""
        with self._lock:
            if self._closed:
                raise NotTold("unicrond ends")
            process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=errors,
                cwd="/",
                env=environment,
                start_new_session=True,
            )
            self._running.add(process)
        with process:
            try:
                _, text = process.communicate(data, timeout=seconds)
            except subprocess.TimeoutExpired:
                _kill(process)
                raise
            finally:
                with self._lock:
                    self._running.discard(process)
        return process.returncode, (text or b"").decode(errors="replace")

    def close(self) -> None:
        """Kill the running programs with all their children, and start no more."""
        with self._lock:
            self._closed = True
            for process in self._running:
                _kill(process)


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kill a process with its session, unless it has ended."""
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def send_mail(config: NotifyConfig, secrets: Secrets, message: Message) -> None:
    """Send the message as plain text. Raises NotTold, OSError and SMTPException."""
    import email.utils
    import smtplib
    import ssl
    from email.message import EmailMessage

    host, port = split(config.smtp)
    mail = EmailMessage()
    mail["Subject"] = one_line(message.subject)
    mail["From"] = config.mail_from or f"unicron@{socket.getfqdn()}"
    mail["To"] = ", ".join(config.mail)
    mail["Date"] = email.utils.formatdate(localtime=True)
    mail["Message-ID"] = email.utils.make_msgid("unicron")
    mail["Auto-Submitted"] = "auto-generated"
    mail.set_content(message.text)
    if message.html:
        mail.add_alternative(message.html, subtype="html")
    with smtplib.SMTP(host, port, timeout=config.timeout) as server:
        if secrets.smtp_user or port == SUBMISSION:
            server.starttls(context=ssl.create_default_context())
        if secrets.smtp_user:
            server.login(secrets.smtp_user, secrets.smtp_password)
        refused = server.send_message(mail)
    if refused:
        raise NotTold(f"the mail server refused {', '.join(sorted(refused))}")


def post(url: str, data: dict[str, object], seconds: float, token: str = "") -> None:
    """Post JSON. Raises NotTold."""
    import urllib.error
    import urllib.request

    class Stay(urllib.request.HTTPRedirectHandler):
        """Refuses redirections: the message is for the server that the admin has named."""

        def redirect_request(self, *_: Any) -> None:
            return None

    headers = {"Content-Type": "application/json", "User-Agent": "unicrond"}
    headers |= {"Authorization": f"Bearer {token}"} if token else {}
    request = urllib.request.Request(url, json.dumps(data).encode(), headers, method="POST")
    try:
        with urllib.request.build_opener(Stay).open(request, timeout=seconds) as answer:
            answer.read(1024)
    except urllib.error.HTTPError as error:
        raise NotTold(f"the server answered with status {error.code}") from None
    except urllib.error.URLError as error:
        raise NotTold(f"the server cannot be reached: {error.reason}") from None
    except (OSError, ValueError) as error:
        raise NotTold(f"the server did not answer: {type(error).__name__}") from None


def main() -> int:
    """Send one order, or print in one line why that failed."""
    order = msgspec.json.decode(sys.stdin.buffer.read(), type=Order)
    message, secrets, seconds = order.message, order.secrets, order.config.timeout
    try:
        if order.target == "mail":
            send_mail(order.config, secrets, message)
        elif order.target == "slack":
            post(secrets.slack, {"text": f"*{message.subject}*\n{message.text}"}, seconds)
        else:
            post(secrets.webhook, message.data, seconds, secrets.webhook_token)
    except Exception as error:
        print_text(_reason(error), err=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
