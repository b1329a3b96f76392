"""Puts the questions of `unicronctl` and the demo to the controller."""

from __future__ import annotations

import getpass
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from unicron_ctl.shared.protocol import claims, long_answers, wire
from unicron_ctl.shared.protocol.munge import MungeError, make_credential
from unicron_ctl.shared.protocol.reach import first_open
from unicron_ctl.shared.settings.config_file import load
from unicron_ctl.shared.settings.places import controller_address, is_guess
from unicron_ctl.shared.system.addresses import Target
from unicron_ctl.shared.system.errors import WRONG_USE, UserError
from unicron_ctl.shared.system.printable import clean, printable

if TYPE_CHECKING:
    from unicron_ctl.shared.protocol.controller_discovery import Hello


def ask_controller(question: Mapping[str, Any], address: str | None = None, timeout: float = 3.0) -> Any:
    """Return the controller's answer to {"kind": ..., **arguments} as plain data (`protocol.answer_schema`).

    address: by default as in `places.controller_address`. Raises UserError, one line.
    """
    return ask_and_see(question, address, timeout)[0]


def ask_and_see(question: Mapping[str, Any], address: str | None = None, timeout: float = 3.0) -> tuple[Any, Target]:
    """Return the same answer, and the address of the controller that gave it."""
    import zmq

    from unicron_ctl.shared.protocol.controller_discovery import Hello
    from unicron_ctl.shared.protocol.encryption import PLAIN, public_key, secure_client

    arguments = dict(question)
    what = arguments.pop("kind")
    config, deadline = load(), time.monotonic() + timeout
    where = controller_address(address, config)
    key, hint = public_key(config=config), ", or see that public_key is the controller's"
    hello = Hello(where, config.agent.controller_users)
    try:
        if key is None:
            key, hint = hello.wait_for_key(timeout), f" ({hello.problem})" if hello.problem else ""
        elif key != PLAIN and hello.several:  # a frozen host accepts connections, but only the controller sends its key
            key = key if hello.wait_for_key(timeout / 2) in (None, key) else None
        elif key == PLAIN:
            hint = ""
            if hello.open() and not hello.local:
                raise UserError(f'public_key = "none" is for a loopback address only, not for {where}', WRONG_USE)
        target = _target(hello, key, deadline) if key is not None else None
    finally:
        hello.close()
    if key is None or target is None:
        raise _nobody(where, address, hint)
    context = zmq.Context()
    channel = context.socket(zmq.DEALER)
    try:
        channel.setsockopt(zmq.LINGER, 0)
        channel.setsockopt(zmq.IPV6, 1)
        mine = secure_client(channel, key)
        channel.connect(target.endpoint)
        who = getpass.getuser(), _credential(mine)
        message = wire.Ask(what=what, args=arguments, user=who[0], credential=who[1], unpacks=True)
        channel.send(wire.encode(message))
        if not channel.poll(max(100, int((deadline - time.monotonic()) * 1000))):
            raise _nobody(where, address, hint)
        try:
            answer = wire.decode(channel.recv(), wire.Answer)
            data = long_answers.data_of(answer)
        except wire.BadMessage as error:
            raise UserError(f"{where} does not speak this release's protocol: {error}") from None
    finally:
        channel.close()
        context.term()
    if not answer.ok:
        raise UserError(printable(answer.error))
    return clean(data), target


Answer = TypeVar("Answer")


def as_struct(data: object, kind: type[Answer]) -> Answer:
    """Convert an answer to this release's struct. Raises UserError, one line, if the controller's differs."""
    try:
        return msgspec.convert(data, kind)
    except msgspec.ValidationError as error:
        raise UserError(
            f"the controller is of another release ({error}): use that release's unicronctl, or --json"
        ) from None


def _target(hello: Hello, key: str, deadline: float) -> Target | None:
    """Return the controller's address that accepts connections, or else the first one, which may still do so."""
    hello.open()
    candidates = hello.candidates(key, hello.reached)
    return first_open(candidates, (deadline - time.monotonic()) / 2) or next(iter(candidates), None)


def _nobody(where: str, address: str | None, hint: str) -> UserError:
    if is_guess(address):
        return UserError(
            "no controller runs on this host, and no other is configured: write "
            'address = "tcp://HOST:PORT" into [controller] of unicron.toml, set UNICRON_CONTROLLER, or pass '
            "--controller"
        )
    return UserError(f"no controller answers at {where}: start `unicrond`, or pass --controller{hint}")


def _credential(key: str) -> str:
    """Make a credential of the asker, bound to the connection with this key. Without munge it is empty, and the answer
    only has what everybody may know."""
    try:
        return make_credential(claims.of_asker(key)) if key else ""
    except MungeError:
        return ""
