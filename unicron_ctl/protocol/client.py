"""Questions to the controller, as `unicronctl` and the demo ask them."""

from __future__ import annotations

import getpass
from typing import Any

from unicron_ctl.config import controller_address
from unicron_ctl.errors import UserError
from unicron_ctl.protocol import wire
from unicron_ctl.protocol.munge import MungeError, make_credential


def ask(question: dict[str, Any], address: str | None = None, timeout: float = 3.0) -> Any:
    """The controller's answer to `{"kind": "status" | "jobs" | "nodes" | "events" | "explain" | "scenario",
    **arguments}`.

    `address`: else $UNICRON_CONTROLLER, the running controller's state folder, the configuration. Raises UserError,
    one line.
    """
    import zmq

    from unicron_ctl.protocol.encryption import public_key, secure_client

    arguments = dict(question)
    what = arguments.pop("kind")
    try:
        credential = make_credential("")
    except MungeError:  # some questions are answered to everybody
        credential = ""
    message = wire.Ask(what=what, args=arguments, user=getpass.getuser(), credential=credential)
    where, key = controller_address(address), public_key()
    context = zmq.Context()
    channel = context.socket(zmq.DEALER)
    try:
        channel.setsockopt(zmq.LINGER, 0)
        secure_client(channel, key)
        try:
            channel.connect(where)
        except zmq.ZMQError as error:
            raise UserError(
                f"{where} is no address of a controller ({error.strerror}): write tcp://HOST:PORT", 2
            ) from None
        channel.send(wire.encode(message))
        hint = ", or see that public_key is the controller's" if key else ""
        if not channel.poll(int(timeout * 1000)):
            raise UserError(f"no controller answers at {where}: start `unicrond`, or pass --controller{hint}")
        try:
            answer = wire.decode(channel.recv(), wire.Answer)
        except wire.BadMessage as error:
            raise UserError(f"{where} does not speak this release's protocol: {error}") from None
    finally:
        channel.close()
        context.term()
    if not answer.ok:
        raise UserError(answer.error)
    return answer.data
