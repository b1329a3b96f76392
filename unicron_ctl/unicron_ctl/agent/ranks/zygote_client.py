"""The agent's side of the zygote (`unicron_detector/processes/zygote.py`): a process of the job's own interpreter that
has imported what the script needs, and forks the ranks. If anything goes wrong with it, the ranks start cold."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from unicron_ctl.agent.ranks.placeholders import fill_words
from unicron_detector.formats import ZYGOTE
from unicron_detector.processes import zygote as program
from unicron_detector.processes.supervise import USUAL, Child, Surroundings

LOAD_SECONDS = 120.0  # for the imports; then ranks that wait for them start cold
ANSWER_SECONDS = 2.0  # for the next fork, which takes 10 ms on an idle machine; then the requested ranks start cold
HUNG_SECONDS = 10.0  # the same; then another zygote is started
REST_SECONDS = 1.0  # before a zygote that died is started again, doubled each time
STEADY_SECONDS = 600.0  # of life after which earlier deaths are forgotten
TRIES = 5


@dataclass(eq=False)
class Coming:
    """A rank's process that is being forked: settled once it has a pid, or a reason to start cold."""

    words: list[str]
    environment: Mapping[str, str]
    stderr: int
    """The reading end of its standard error."""
    leave: int
    """The writing end of the pipe by which it gets leave to begin."""
    theirs: tuple[int, int]
    """The other ends of both."""
    surroundings: Surroundings = USUAL
    asked: float | None = None
    """The time at which the zygote was asked (monotonic)."""
    late: bool = False
    """The zygote has not answered in time."""
    pid: int | None = None
    cold: str = ""
    """Why it has to start cold."""

    @classmethod
    def of(cls, words: list[str], environment: Mapping[str, str], surroundings: Surroundings = USUAL) -> Coming:
        """Make the pipes of a process that is not requested yet. Raises OSError."""
        stderr, its_stderr = os.pipe()
        try:
            its_leave, leave = os.pipe()
        except OSError:
            os.close(stderr)
            os.close(its_stderr)
            raise
        return cls(words, environment, stderr, leave, (its_stderr, its_leave), surroundings)

    @property
    def settled(self) -> bool:
        return self.pid is not None or bool(self.cold)

    def child(self) -> Child | None:
        """Let the process begin and return it; None if it is gone already or has to start cold."""
        child = None
        if self.pid is not None and not self.cold:
            try:
                child = Child.of_fork(self.pid, self.stderr, self.surroundings)
            except ProcessLookupError:
                pass
            except OSError as error:  # no descriptor is left; without leave the process ends
                self.cold = f"it could not be taken in: {error.strerror}"
        if child is None:
            self.drop()
            return None
        with contextlib.suppress(BrokenPipeError):  # it was killed
            os.write(self.leave, b"g")
        os.close(self.leave)
        return child

    def forget(self) -> None:
        """Close the process's ends of the pipes."""
        for descriptor in self.theirs:
            os.close(descriptor)

    def drop(self) -> None:
        """Give the process up. A fork that comes all the same gets no leave, and ends."""
        self.cold = self.cold or "it was not wanted any more"
        os.close(self.stderr)
        os.close(self.leave)


class Answer(msgspec.Struct):
    """A message of the zygote."""

    ready: bool = False
    """Whether it has imported everything."""
    off: str | None = None
    """Why it ends."""
    number: int = 0
    """The request that it answers."""
    pid: int | None = None
    cold: str = ""
    """Why the process has to start cold."""
    stale: bool = False
    """A file has changed since it was imported: another zygote is needed."""


class AlwaysCold:
    """Starts every process cold, in place of a zygote."""

    def __init__(self, why: str) -> None:
        self.why = why
        """The reason."""

    def request_fork(self, environment: Mapping[str, str], *, surroundings: Surroundings = USUAL) -> Coming | None:
        """Return None: there is no zygote."""
        return None


class ZygoteClient:
    """Runs one zygote process after another, and requests forks of it."""

    def __init__(
        self,
        python: Sequence[str],  # the interpreter with its options
        words: Sequence[str],  # the command after it
        environment: Mapping[str, str],  # the zygote's
        preload: Sequence[str],  # modules that the user has named
        told: Sequence[str],  # further ones
        watch: Callable[[int, Callable[[], None]], None],  # (descriptor, called when it can be read)
        unwatch: Callable[[int], None],
        answer: float = ANSWER_SECONDS,  # without the next fork until the ranks start cold
        hung: float = HUNG_SECONDS,  # without the next fork until another zygote is started
    ):
        self._python, self._words, self.environment = list(python), list(words), dict(environment)
        task = {"format": ZYGOTE.number, "preload": list(preload), "told": list(told), "agent": os.getpid()}
        self._task = json.dumps(task).encode()
        self._watch, self._unwatch = watch, unwatch
        self._answer, self._hung = answer, hung
        self._child: Child | None = None
        self._line: socket.socket | None = None
        self.ready = False
        self._asked: dict[int, Coming] = {}  # requests without an answer, oldest first
        self._number = self._tries = 0
        self._answered = 0.0  # the time of the last answer
        self._began = 0.0
        self._again: float | None = None  # the time at which the next zygote is started
        self.why = ""
        """The reason for which ranks start cold now, if any."""

    @property
    def pid(self) -> int | None:
        """The present zygote's process."""
        return self._child.pid if self._child is not None else None

    def request_fork(
        self, environment: Mapping[str, str], words: list[str] | None = None, surroundings: Surroundings = USUAL
    ) -> Coming | None:
        """Request a warm process with this environment, as soon as there is one; None if it has to start cold. words:
        in place of the command. Its standard streams stay open until it has settled. Raises OSError."""
        if self._child is None:
            return None
        if any(coming.late for coming in self._asked.values()):
            self.why = "the zygote does not answer"
            return None
        coming = Coming.of(fill_words(words or self._words, environment), environment, surroundings)
        self._number += 1
        self._asked[self._number] = coming
        if self.ready:
            try:
                self._send(self._number, coming, time.monotonic())
            except OSError:
                del self._asked[self._number]
                coming.drop()
                raise
        return coming

    def _send(self, number: int, coming: Coming, now: float) -> None:
        """Send a request. Raises OSError if no descriptor is left; a zygote that is gone is noticed elsewhere. now: the
        same for all requests that are sent together (monotonic), so that one look at the files serves them all."""
        assert self._line is not None
        coming.asked = now
        around, cpus = coming.surroundings, sorted(coming.surroundings.cpus)
        streams = [own if given is None else given for own, given in enumerate((around.stdin, around.stdout))]
        request = json.dumps({"environment": dict(coming.environment), "words": coming.words, "cpus": cpus}).encode()
        message = json.dumps({"number": number, "asked": now}).encode()
        file = -1
        try:
            file = os.memfd_create("unicron-request")
            with open(file, "wb", closefd=False) as writing:
                writing.write(request)
            with contextlib.suppress(OSError):
                socket.send_fds(self._line, [message], [file, *streams, *coming.theirs])
        finally:
            if file >= 0:
                os.close(file)
            coming.forget()

    def _send_late(self, number: int, coming: Coming, now: float) -> None:
        """Send a request that came before the zygote was ready."""
        self._asked[number] = coming
        try:
            self._send(number, coming, now)
        except OSError as error:
            del self._asked[number]
            self.why = coming.cold = f"it could not be asked for: {error.strerror}"

    def read(self) -> None:
        """Read the zygote's messages, and notice its end."""
        while self._line is not None:
            try:
                data = self._line.recv(program.ANSWER_BYTES)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if not data:
                self._died()
            elif not self._take_answer(msgspec.json.decode(data, type=Answer)):
                return  # its last message

    def _take_answer(self, answer: Answer) -> bool:
        """Take in one message; False if there is nothing more to read."""
        if answer.off is not None:
            self._end(answer.off)
            return False
        if answer.ready:
            self.ready = True
            unsent, self._asked = self._asked, {}
            now = time.monotonic()
            for number, coming in unsent.items():
                if coming.settled:
                    coming.forget()
                else:
                    self._send_late(number, coming, now)
            return True
        self._answered = time.monotonic()
        coming = self._asked.pop(answer.number)
        if coming.settled:
            return True  # too late
        coming.pid, coming.cold = answer.pid, answer.cold
        self.why = coming.cold
        if answer.stale:
            self._end(coming.cold)
            self.start_process()
            return False
        return True

    def _died(self) -> None:
        child, lasted = self._child, time.monotonic() - self._began
        code = child.reap(1.0) if child is not None else None
        words = child.tail().splitlines()[-1:] if child is not None else []
        self._end(f"the zygote has ended with {code}" + "".join(f": {word}" for word in words))
        self._tries = 1 if lasted > STEADY_SECONDS else self._tries + 1
        if self._tries < TRIES:
            self._again = time.monotonic() + REST_SECONDS * 2 ** (self._tries - 1)

    def on_timer(self, now: float) -> None:
        """Give up what takes too long, and start the next zygote if it is due. now: monotonic."""
        if self._again is not None and now >= self._again:
            self.start_process()
        for coming in self._asked.values():
            limit = LOAD_SECONDS if coming.asked is None else self._answer
            if not coming.settled and now >= self._since(coming) + limit:
                what = "imported everything" if coming.asked is None else "answered"
                coming.late = True
                self.why = coming.cold = f"the zygote has not {what} within {limit:g} s"
        asked = [coming for coming in self._asked.values() if coming.asked is not None]
        if any(now >= self._since(coming) + self._hung for coming in asked):
            assert self._child is not None
            self._child.signal(9)

    def timeout(self, now: float) -> float:
        """Return the seconds until :meth:`on_timer` must be called; infinity if nothing is due."""
        due = [self._again] if self._again is not None else []
        for coming in self._asked.values():
            if coming.asked is not None:
                due.append(self._since(coming) + (self._hung if coming.settled else self._answer))
            elif not coming.settled:
                due.append(self._since(coming) + LOAD_SECONDS)
        return max(0.0, min(due) - now) if due else float("inf")

    def _since(self, coming: Coming) -> float:
        """Return the time from which this fork's limit counts. Forks are made one after the other, so each has its time
        after the one before."""
        return self._began if coming.asked is None else max(coming.asked, self._answered)

    def start_process(self) -> None:
        """Start a zygote."""
        self._again, self._began = None, time.monotonic()
        try:
            mine, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        except OSError as error:
            self.why = f"no zygote could be started: {error.strerror}"
            return
        command = [*self._python, program.__file__, str(its.fileno()), *self._words]
        try:
            self._child = child = Child(command, self.environment, keep=[its.fileno()])
        except OSError as error:
            mine.close()
            self.why = f"couldn't start {self._python[0]}: {error.strerror}"
            return
        finally:
            its.close()
        self._line = mine
        mine.setblocking(False)
        with contextlib.suppress(OSError):  # it has ended already, which its end of the line shows
            mine.send(self._task)
        self._watch(mine.fileno(), self.read)
        self._watch(child.stderr, self._pass_stderr)

    def _pass_stderr(self) -> None:
        if self._child is not None and not self._child.pass_stderr():
            self._unwatch(self._child.stderr)

    def _end(self, why: str) -> None:
        """End the present zygote, and give up all requests to it."""
        child, line, self._child, self._line = self._child, self._line, None, None
        self.ready, self.why = False, why
        for coming in self._asked.values():
            if coming.asked is None:
                coming.forget()
            coming.cold = coming.cold or why
        self._asked.clear()
        if child is not None and line is not None:
            self._unwatch(line.fileno())
            self._unwatch(child.stderr)
            line.close()
            child.signal(9)
            child.reap(1.0)
            child.close()

    def close(self) -> None:
        """End the zygote, and forks that nobody has taken over."""
        self._again = None
        self._end("the agent ends")


Starter = ZygoteClient | AlwaysCold
