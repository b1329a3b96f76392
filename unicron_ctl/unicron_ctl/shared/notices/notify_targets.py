"""Sends a message to a target of [notify]: a hook program, mail, Slack, a webhook. Slow: for a thread of its own."""

from __future__ import annotations

import contextlib
import email.utils
import http.client
import json
import os
import signal
import smtplib
import socket
import ssl
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from email.message import EmailMessage
from functools import partial
from typing import Any

from unicron_ctl.shared.notices.notices import Message
from unicron_ctl.shared.settings.notify import NotifyConfig, Secrets, unfit
from unicron_ctl.shared.system.addresses import split
from unicron_ctl.shared.system.errors import one_line, shorten
from unicron_ctl.shared.system.redaction import without_values

SUBMISSION = 587  # the port of mail that is submitted, always encrypted
MOST_CHARACTERS = 300  # characters of what a target said
WHOLE = 5.0  # times the section's time limit: what all answers of a server may take together
Deliver = Callable[[Message], None]


class NotTold(Exception):
    """A target was not told; the text says why, and holds no secret."""


def targets(config: NotifyConfig, secrets: Secrets, hooks: Hooks) -> dict[str, Deliver]:
    """Name -> what tells it. Each raises NotTold, and ends within :data:`WHOLE` times the section's time limit."""
    seconds = config.timeout
    found: dict[str, Deliver] = {}
    if config.hook:
        found["hook"] = partial(hooks.run, config.hook, seconds)
    if config.mail:
        found["mail"] = partial(send_mail, config, secrets)
    if secrets.slack:
        found["slack"] = lambda message: post(secrets.slack, {"text": f"*{message.subject}*\n{message.text}"}, seconds)
    if secrets.webhook:
        found["webhook"] = lambda message: post(secrets.webhook, message.data, seconds, secrets.webhook_token)
    return {name: partial(_without_secrets, deliver, secrets.words) for name, deliver in found.items()}


def _without_secrets(deliver: Deliver, words: list[str], message: Message) -> None:
    try:
        deliver(message)
    except Exception as error:
        text = one_line(f"{error}" if isinstance(error, NotTold) else f"{type(error).__name__}: {error}")
        raise NotTold(shorten(without_values(text, words, 1), MOST_CHARACTERS)) from None


class Hooks:
    """The hook programs that run. None of them outlives the controller's end."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running = set[subprocess.Popen[bytes]]()
        self._closed = False

    def run(self, path: str, seconds: float, message: Message) -> None:
        """Runs the program, without a shell, with the message as JSON on its standard input and little else. All that
        it has started is killed when it takes too long. Raises NotTold."""
        if why := unfit(path):
            raise NotTold(why)
        process = self._start(path)
        data = json.dumps({"subject": message.subject, **message.data}).encode()
        with process:
            try:
                process.communicate(data, timeout=seconds)
            except subprocess.TimeoutExpired:
                _kill(process)
                raise NotTold(f"the hook did not end within {seconds:g} s and was killed") from None
            finally:
                with self._lock:
                    self._running.discard(process)
        if process.returncode:
            raise NotTold(f"the hook ended with status {process.returncode}")

    def _start(self, path: str) -> subprocess.Popen[bytes]:
        environment = {"PATH": "/usr/local/bin:/usr/bin:/bin:/usr/local/sbin:/usr/sbin:/sbin", "LC_ALL": "C.UTF-8"}
        with self._lock:
            if self._closed:
                raise NotTold("unicrond ends")
            process = subprocess.Popen(
                [path],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                cwd="/",
                env=environment,
                start_new_session=True,
            )
            self._running.add(process)
            return process

    def close(self) -> None:
        """Kills those that run, with all that they have started; none is started any more."""
        with self._lock:
            self._closed = True
            for process in self._running:
                _kill(process)


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kills a process with its session, unless it has ended."""
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


class _Exchange:
    """An exchange with a server. Each byte begins the time limit of a socket anew, so this has one for the whole: it
    shuts the connections down then, and raises NotTold."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._until = time.monotonic() + seconds
        self._over = False
        self._connections: list[socket.socket] = []  # copies: TLS takes the first one away
        self._timer = threading.Timer(seconds, self._end)
        self._timer.daemon = True

    def __enter__(self) -> _Exchange:
        self._timer.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()
        self._timer.join()
        for connection in self._connections:
            connection.close()
        if self._over:
            raise NotTold(f"the server was not through within {self._seconds:g} s") from None

    def _end(self) -> None:
        self._over = True
        for connection in list(self._connections):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def connect(self, address: tuple[str, int], timeout: float, source: Any = None) -> socket.socket:
        """Connect as socket.create_connection does, whose limit is for each of the host's addresses."""
        error = OSError("it has no address")
        for *_, place in socket.getaddrinfo(*address, type=socket.SOCK_STREAM):
            left = max(0.01, min(timeout, self._until - time.monotonic()))
            try:
                connection = socket.create_connection((str(place[0]), address[1]), left, source)
            except OSError as reason:
                error = reason
                continue
            connection.settimeout(timeout)
            self._connections.append(connection.dup())
            if self._over:
                self._end()
            return connection
        raise error


class _Smtp(smtplib.SMTP):
    def __init__(self, exchange: _Exchange, host: str, port: int, timeout: float) -> None:
        self._exchange = exchange
        super().__init__(host, port, timeout=timeout)

    def _get_socket(self, host: str, port: int, timeout: float) -> socket.socket:
        return self._exchange.connect((host, port), timeout)


class _Http(urllib.request.HTTPHandler, urllib.request.HTTPSHandler):
    def __init__(self, exchange: _Exchange) -> None:
        super().__init__()
        self._exchange = exchange

    def http_open(self, request: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(partial(self._connection, http.client.HTTPConnection), request)

    def https_open(self, request: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(partial(self._connection, http.client.HTTPSConnection), request)

    def _connection(self, kind: type[http.client.HTTPConnection], *names: Any, **options: Any) -> Any:
        connection: Any = kind(*names, **options)
        connection._create_connection = self._exchange.connect  # Python has no public name for it
        return connection


def send_mail(config: NotifyConfig, secrets: Secrets, message: Message) -> None:
    """Sends the message as plain text. Raises NotTold, OSError and SMTPException."""
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
    exchange = _Exchange(WHOLE * config.timeout)
    with exchange, _Smtp(exchange, host, port, config.timeout) as server:
        if secrets.smtp_user or port == SUBMISSION:
            server.starttls(context=ssl.create_default_context())
        if secrets.smtp_user:
            server.login(secrets.smtp_user, secrets.smtp_password)
        refused = server.send_message(mail)
    if refused:
        raise NotTold(f"the mail server refused {', '.join(sorted(refused))}")


class _Stay(urllib.request.HTTPRedirectHandler):
    """A redirection is refused: what is told is for the server that the admin has named."""

    def redirect_request(self, *_: Any) -> None:
        return None


def post(url: str, data: dict[str, object], seconds: float, token: str = "") -> None:
    """Posts JSON. Raises NotTold."""
    headers = {"Content-Type": "application/json", "User-Agent": "unicrond"}
    headers |= {"Authorization": f"Bearer {token}"} if token else {}
    request = urllib.request.Request(url, json.dumps(data).encode(), headers, method="POST")
    try:
        with _Exchange(WHOLE * seconds) as exchange:
            opener = urllib.request.build_opener(_Stay, _Http(exchange))
            with opener.open(request, timeout=seconds) as answer:
                answer.read(1024)
    except urllib.error.HTTPError as error:
        raise NotTold(f"the server answered with status {error.code}") from None
    except urllib.error.URLError as error:
        raise NotTold(f"the server cannot be reached: {error.reason}") from None
    except (OSError, ValueError) as error:
        raise NotTold(f"the server did not answer: {type(error).__name__}") from None
