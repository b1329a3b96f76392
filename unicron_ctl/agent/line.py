"""The agent's line to the controller: one DEALER, encrypted with a key pair that lasts as long as the agent.

The controller knows the agent by that key, so the connection may break and come back at any time. The controller's own
key is asked for at the start, and again whenever the line is down: a controller that lost its state folder has a new
one.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from typing import TypeVar

import zmq
from zmq.utils.monitor import parse_monitor_message

from unicron_ctl.agent.place import Place
from unicron_ctl.config import load
from unicron_ctl.mailbox import Mailbox
from unicron_ctl.protocol import claims, wire
from unicron_ctl.protocol.encryption import PLAIN, new_pair, public_key, secure_client
from unicron_ctl.protocol.hello import HELLO_SECONDS, Hello
from unicron_ctl.protocol.munge import MungeError, make_credential

DOWN_SECONDS = 1.0  # between two questions for the controller's key while the line is down
# A host that vanishes closes no connection, and TCP tries for a quarter of an hour: ZeroMQ asks every second, and
# connects again when five seconds brought no answer, or two no connection.
TO_CONTROLLER = (
    (zmq.LINGER, 500),
    (zmq.SNDHWM, 10000),
    (zmq.RECONNECT_IVL, 100),
    (zmq.RECONNECT_IVL_MAX, 1000),
    (zmq.CONNECT_TIMEOUT, 2000),
    (zmq.HEARTBEAT_IVL, 1000),
    (zmq.HEARTBEAT_TIMEOUT, 5000),
    (zmq.MAXMSGSIZE, wire.MAX_BYTES),
)
Result = TypeVar("Result")
EVENTS = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED


class Line:
    """Keeps itself connected to the controller at `address`. `socket` is the DEALER; nothing may be sent before `key`
    is known. Raises zmq.ZMQError and UserError for an address that is none or a wrong configuration.

    pair: the agent's CURVE keys for life, public and secret. key: the public one where the line is encrypted,
    :data:`PLAIN` with a controller that encrypts nothing, None before either is known.
    up: the controller's side has answered, and has not closed since.
    results: what to call in the loop. Munge, the name service and Slurm are asked in threads: each may take seconds, in
    which the ranks must be heard.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], address: str) -> None:
        config = load()
        self._known = public_key(config=config)
        self._hello = Hello(address, config.agent.controller_users)
        self._address, self.pair = address, new_pair()
        self._theirs: str | None = None  # the controller's public key
        self._asked = 0.0
        self.key: str | None = None
        self.up = False
        self._problem = ""
        self.results: Mailbox[Callable[[], None]] = Mailbox()
        self._working: set[str] = set()
        self.socket: zmq.Socket[bytes] = context.socket(zmq.DEALER)
        for option, value in TO_CONTROLLER:
            self.socket.setsockopt(option, value)
        self.socket.monitor(f"inproc://line-{id(self)}", EVENTS)
        self.events: zmq.Socket[bytes] = context.socket(zmq.PAIR)
        self.events.connect(f"inproc://line-{id(self)}")
        self._hello.open()
        if self._known == PLAIN and not self._hello.local:
            self._known = None  # never unencrypted over a network, whatever the environment says
        if self._known is not None:
            self._connect(self._known)

    @property
    def problem(self) -> str:
        """Why the controller is not believed, or cannot be asked for more."""
        return self._problem or self._hello.problem

    @property
    def answers(self) -> int:
        """The descriptor at which answers about the key arrive; -1 while there is none."""
        return self._hello.fileno()

    def turn(self) -> None:
        """Asks for the controller's key while it is not known, or the line is down."""
        if self.up or self._known is not None:
            return
        now = time.monotonic()
        if now - self._asked >= (HELLO_SECONDS if self.key is None else DOWN_SECONDS):
            self._asked = now
            self._hello.ask()

    def learn(self, learned: Callable[[], None]) -> None:
        """Reads what was answered; `learned` is called when the line leads to another key."""
        answers = self._hello.read()

        def then(theirs: str | None) -> None:
            if theirs is None or self.up or theirs == self._theirs:
                return
            if self._theirs and theirs == PLAIN:
                return  # encrypted once, encrypted for ever
            self._connect(theirs)
            learned()

        if answers:
            self._in_thread("answers", lambda: self._hello.believed(answers), then)

    def register(
        self,
        place: Place,
        agent: str,
        door: str,
        peer: str,
        images: tuple[str, str],
        send: Callable[[wire.Message], None],
    ) -> None:
        """Sends the agent's first message, with a fresh credential that is bound to this line, as soon as that is made;
        nothing before the line leads anywhere. images: where it takes and gives them, and the token for that."""
        message = wire.Register(
            job=place.job,
            element=place.element,
            agent=agent,
            node=place.node,
            address=place.address,
            slots=place.slots,
            settings=place.settings,
            step=place.step,
            door=door,
            peer=peer,
            key=self.pair[0],
            images=images[0],
            token=images[1],
        )
        key = self.key
        if key == PLAIN:
            self._problem = ""
            send(message)
        if not key:
            return

        def make() -> str:
            try:
                message.credential = make_credential(claims.of_agent(message, key))
            except MungeError as error:  # with a key of the admin's, auth may be "none"
                return str(error)
            return ""

        def then(problem: str) -> None:
            self._problem = problem
            if self.key == key:
                send(message)

        self._in_thread("credential", make, then)

    def _in_thread(self, what: str, work: Callable[[], Result], then: Callable[[Result], None]) -> None:
        """Runs `work` in a thread, then `then` in the loop; nothing while the same is under way."""
        if what in self._working:
            return
        self._working.add(what)

        def run() -> None:
            found = []
            try:
                found.append(work())
            finally:  # whatever broke, the next try may do
                self.results.put(lambda: done(found))

        def done(found: list[Result]) -> None:
            self._working.discard(what)
            for result in found:
                then(result)

        threading.Thread(target=run, name=f"unicron-{what}", daemon=True).start()

    def notice(self) -> None:
        """Takes in what happened to the connection."""
        while self.events.poll(0):
            event = parse_monitor_message(self.events.recv_multipart())["event"]
            self.up = event == zmq.EVENT_HANDSHAKE_SUCCEEDED

    def close(self) -> None:
        self.socket.disable_monitor()
        self.events.close(0)
        self.socket.close()
        self._hello.close()
        self.results.close()

    def _connect(self, theirs: str) -> None:
        if self._theirs is not None:
            with contextlib.suppress(zmq.ZMQError):  # an injected loss of the network has done so already
                self.socket.disconnect(self._address)
        self.key = secure_client(self.socket, theirs, self.pair)
        self.socket.connect(self._address)
        self._theirs = theirs
