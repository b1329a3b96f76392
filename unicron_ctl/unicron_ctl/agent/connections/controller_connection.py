"""The agent's line to the controller: one DEALER, encrypted with a key pair that lasts as long as the agent.

The controller knows the agent by that key, so the connection may break and come back at any time. The agent asks for
the controller's own key at the start and whenever the line is down: a controller that lost its state folder has a new
key.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from typing import TypeVar

import zmq
from zmq.utils.monitor import parse_monitor_message

from unicron_ctl.shared.protocol import claims, wire
from unicron_ctl.shared.protocol.controller_discovery import HELLO_SECONDS, ControllerKey, Hello
from unicron_ctl.shared.protocol.encryption import PLAIN, new_pair, public_key, secure_client
from unicron_ctl.shared.protocol.munge import MungeError, make_credential
from unicron_ctl.shared.protocol.reach import first_open
from unicron_ctl.shared.settings.config_file import load
from unicron_ctl.shared.system.addresses import Target, endpoints, is_numeric
from unicron_ctl.shared.system.mailbox import Mailbox

OUTLIVED_SECONDS = 20.0  # in which a controller that was taken over ends
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
    (zmq.IPV6, 1),
)
# With a standby, the controller may have moved to another host: notice a silence earlier.
TO_ONE_OF_SEVERAL = ((zmq.HEARTBEAT_IVL, 500), (zmq.HEARTBEAT_TIMEOUT, 2000))
DOWN_SECONDS_OF_SEVERAL = 0.5
REDIAL_SECONDS = 2.0  # without a connection, before the controller's name is resolved and its addresses tried again
RACE_SECONDS = 1.5  # for one of them to accept
Result = TypeVar("Result")
EVENTS = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED


class Line:
    """Keeps itself connected to the controller at `address`, or at one of several. Raises zmq.ZMQError for an invalid
    address, UserError for a wrong configuration."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], address: str) -> None:
        config = load()
        self._known = public_key(config=config)
        self._hello = Hello(address, config.agent.controller_users)
        self.pair = new_pair()
        """The agent's CURVE keys, public and secret."""
        self._endpoint = ""  # the controller's numeric address, to which the socket is connected
        self._cut = False  # by an injected loss of the network
        self._dialed = 0.0
        self._theirs: str | None = None  # the controller's public key
        self._dialed_key: str | None = None  # the key with which the socket was connected
        self._asked = 0.0
        self.key: str | None = None
        """The agent's public key on an encrypted line; PLAIN if the controller encrypts nothing; None at first."""
        self.up = False
        """The controller's side has answered, and has not closed since."""
        self._problem = ""
        self.results: Mailbox[Callable[[], None]] = Mailbox()
        """Calls to make in the agent's loop: threads ask munge, the name service and Slurm, which may take seconds."""
        self._working: set[str] = set()
        self._term = 0  # the highest of a controller with this key
        self._doubted = 0.0  # since when only controllers of earlier terms speak; 0.0 if the last message was current
        self.socket: zmq.Socket[bytes] = context.socket(zmq.DEALER)
        """Nothing may be sent while `key` is None."""
        for option, value in (*TO_CONTROLLER, *(TO_ONE_OF_SEVERAL if self._hello.several else ())):
            self.socket.setsockopt(option, value)
        self.socket.monitor(f"inproc://line-{id(self)}", EVENTS)
        self.events: zmq.Socket[bytes] = context.socket(zmq.PAIR)
        self.events.connect(f"inproc://line-{id(self)}")
        if all(is_numeric(host) for host, _ in endpoints(address)) or self._known == PLAIN:
            self._hello.open()
        if self._known == PLAIN and not self._hello.local:
            self._known = None  # never unencrypted over a network, whatever the environment says
        if self._known is not None:
            self._connect(self._known)

    @property
    def problem(self) -> str:
        """Why the controller is not believed or cannot be reached; empty if all is well."""
        problem = self._problem or self._hello.problem
        if problem or self.up or not self._endpoint:
            return problem
        return f"no connection to {self._endpoint}"

    @property
    def answers(self) -> int:
        """The descriptor at which answers about the key arrive; -1 if there is none."""
        return self._hello.fileno()

    def find_controller(self) -> None:
        """Ask for the controller's key while it is unknown or the line is down."""
        if self.up:
            return
        now = time.monotonic()
        if self._theirs is not None and now - self._dialed >= REDIAL_SECONDS:
            self._dialed = now
            self._find(self._theirs)
        down = DOWN_SECONDS_OF_SEVERAL if self._hello.several else DOWN_SECONDS
        asks = self._known is None or self._hello.several  # a standby does not answer, so the controller is who does
        if asks and now - self._asked >= (HELLO_SECONDS if self.key is None else down):
            self._asked = now
            if self._hello.fileno() >= 0:
                self._hello.send_questions()
            else:
                self._in_thread("name", self._hello.open, lambda found: self._hello.send_questions() if found else None)

    def learn(self, learned: Callable[[], None]) -> None:
        """Read the answers; `learned` is called when the line leads to another key."""
        answers = self._hello.read()

        def then(found: ControllerKey | None) -> None:
            if found is None or self.up or self._known not in (None, found.key):
                return
            if found.key == self._theirs:
                if self._hello.several and found.reached is not None:
                    self._dial(found.reached)
                return
            if self._theirs and found.key == PLAIN:
                return  # encrypted once, encrypted for ever
            self._term = 0
            self._connect(found.key, found.reached)
            learned()

        if answers:
            self._in_thread("answers", lambda: self._hello.first_believed(answers), then)

    def register(self, message: wire.Register, send: Callable[[wire.Message], None]) -> None:
        """Send the agent's first message, once its fresh credential, which is bound to this line, has been made.
        Nothing is sent while the line leads nowhere."""
        message.key = self.pair[0]
        key = self.key
        if key == PLAIN:
            self._problem = ""
            send(message)
        if not key:
            return

        def make() -> str:
            try:
                message.credential = make_credential(claims.of_agent(message, key))
            except MungeError as error:  # with a key that the admin gave, auth may be "none"
                return str(error)
            return ""

        def then(problem: str) -> None:
            self._problem = problem
            if self.key == key:
                send(message)

        self._in_thread("credential", make, then)

    def _in_thread(self, what: str, work: Callable[[], Result], then: Callable[[Result], None]) -> None:
        """Run `work` in a thread, then `then` in the loop, unless the same work is under way."""
        if what in self._working:
            return
        self._working.add(what)

        def run() -> None:
            found = []
            try:
                found.append(work())
            finally:  # the next try may succeed
                self.results.put(lambda: hand_on(found))

        def hand_on(found: list[Result]) -> None:
            self._working.discard(what)
            for result in found:
                then(result)

        try:
            threading.Thread(target=run, name=f"unicron-{what}", daemon=True).start()
        except RuntimeError:  # the system grants no more threads: the next try may get one
            self._working.discard(what)

    def notice(self) -> None:
        """Read what has happened to the connection."""
        while self.events.poll(0):
            event = parse_monitor_message(self.events.recv_multipart())["event"]
            self.up = event == zmq.EVENT_HANDSHAKE_SUCCEEDED

    def is_current(self, term: int) -> bool:
        """Say whether a message of a controller of this term counts. If not, another controller is looked for.

        A controller that was taken over ends soon. One that still speaks after OUTLIVED_SECONDS without a message of a
        later term is right: the clock was far ahead in the other's time, and its log comes from an older backup.
        """
        now = time.monotonic()
        if term < self._term:
            self._doubted = self._doubted or now
            if now - self._doubted < OUTLIVED_SECONDS:
                self.up = False
                return False
        self._term, self._doubted = term, 0.0
        return True

    def close(self) -> None:
        self.socket.disable_monitor()
        self.events.close(0)
        self.socket.close()
        self._hello.close()
        self.results.close()

    def hang_up(self) -> None:
        """End the connection until `call_again`: an injected loss of the network."""
        self._cut = True
        self._disconnect()

    def call_again(self) -> None:
        """Connect again after `hang_up`."""
        self._cut = False
        if self._endpoint:
            self.socket.connect(self._endpoint)

    def _connect(self, theirs: str, reached: Target | None = None) -> None:
        """Lead the line to the holder of this key. reached: the address that has told it."""
        self._theirs, self._dialed = theirs, time.monotonic()
        candidates = self._hello.candidates(theirs, reached)
        if reached is not None or len(candidates) == 1:
            self._dial(candidates[0])
        else:
            self._find(theirs)

    def _find(self, theirs: str) -> None:
        """Find in a thread which of the controller's addresses accepts a connection, and lead the line there."""

        def work() -> Target | None:
            if not self._hello.resolve_again():
                return None
            return first_open(self._hello.candidates(theirs), RACE_SECONDS)

        def then(found: Target | None) -> None:
            if self._theirs != theirs or self.up:
                return
            if found is None and not self._endpoint:  # ZeroMQ tries the first address again and again
                found = next(iter(self._hello.candidates(theirs)), None)
            if found is not None:
                self._dial(found)

        self._in_thread("addresses", work, then)

    def _dial(self, target: Target) -> None:
        if self.key is not None and target.endpoint == self._endpoint and self._dialed_key == self._theirs:
            return  # ZeroMQ connects again by itself
        assert self._theirs is not None
        if self._endpoint:
            self._disconnect()
        self.key = secure_client(self.socket, self._theirs, self.pair)
        self._endpoint, self._dialed_key, self._dialed = target.endpoint, self._theirs, time.monotonic()
        if not self._cut:
            self.socket.connect(self._endpoint)

    def _disconnect(self) -> None:
        with contextlib.suppress(zmq.ZMQError):  # it is disconnected already
            self.socket.disconnect(self._endpoint)
