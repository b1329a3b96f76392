"""Asks the nodes: a Slurm step collects each node's facts, and this host tries the nodes' ports.

srun passes on the output of steps in pieces of about a kilobyte, in which lines of several nodes mix. So facts travel
as short lines, each with its node and its place.
"""

from __future__ import annotations

import base64
import contextlib
import io
import os
import secrets
import socket
import sys
import threading
import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import IO, Annotated

import msgspec

from unicron_ctl.doctor.facts import COMPUTE, HostFacts, Question
from unicron_ctl.shared.slurm.slurm_client import NodeInfo
from unicron_ctl.shared.slurm.steps import END_SECONDS, Steps, why_not_idle
from unicron_ctl.shared.system.addresses import listen_at, reason_of
from unicron_ctl.shared.system.errors import one_line
from unicron_ctl.shared.system.printable import printable

MARK = "unicron-doctor:"
PIECE = 600  # characters of an answer in a line
LINE = 2048  # characters; a longer line is read as several
MOST_PIECES = 1000  # of an answer; a real one has about ten
MOST_FACTS = 4 << 20  # bytes of an answer, unpacked
MOST_ERRORS = 1 << 20  # characters of a step's errors
DOOR, FACTS = "door", "facts"
GREETING = b"unicron-doctor\n"
DOOR_SECONDS = 20.0  # a node's port stays open for so long
CONNECT_SECONDS = 3.0
JOB_NAME = "unicron-doctor-"
AT_ONCE = 128  # ports tried at the same time
MODULE = "unicron_ctl.doctor.host_facts"
PortNumber = Annotated[int, msgspec.Meta(ge=1, le=65535)]


# ------------------------------------------------------------------------------------------------------------- lines


def encode(facts: HostFacts) -> bytes:
    return msgspec.json.encode(facts)


def encode_question(question: Question) -> str:
    """Encode the question as one word of a command line."""
    return base64.urlsafe_b64encode(zlib.compress(msgspec.json.encode(question))).decode()


def decode_question(word: str) -> Question:
    return msgspec.json.decode(zlib.decompress(base64.urlsafe_b64decode(word)), type=Question)


def pieces(node: str, kind: str, data: bytes) -> list[str]:
    """Divide the data into lines."""
    text = base64.b64encode(zlib.compress(data)).decode()
    parts = [text[at : at + PIECE] for at in range(0, len(text), PIECE)]
    return [f"{MARK} {node} {kind} {number} {len(parts)} {part}" for number, part in enumerate(parts)]


class Collector:
    """Puts the pieces of answers together, in any order."""

    def __init__(self, names: Collection[str]) -> None:
        self._names = names  # the nodes whose pieces count
        self._parts: dict[tuple[str, str], dict[int, str]] = {}

    def add_line(self, line: str) -> tuple[str, str, bytes] | None:
        """Return (node, kind, data) if the line completes an answer, else None."""
        words = line.split()
        if len(words) != 6 or words[0] != MARK or not (_is_number(words[3]) and _is_number(words[4])):
            return None
        node, kind, number, count = words[1], words[2], int(words[3]), int(words[4])
        if node not in self._names or kind not in (DOOR, FACTS) or not number < count <= MOST_PIECES:
            return None
        parts = self._parts.setdefault((node, kind), {})
        parts[number] = words[5]
        if len(parts) < count:
            return None
        try:
            return node, kind, _unpack(base64.b64decode("".join(parts[i] for i in range(count))))
        except (KeyError, ValueError, zlib.error):
            return None


def _is_number(word: str) -> bool:
    return word.isascii() and word.isdecimal() and len(word) <= 6


def _unpack(data: bytes) -> bytes:
    """Unpack the data of a node, but not more than MOST_FACTS. Raises ValueError and zlib.error."""
    packed = zlib.decompressobj()
    found = packed.decompress(data, MOST_FACTS)
    if not packed.eof:
        raise ValueError("no whole answer, or one too long")
    return found


# ------------------------------------------------------------------------------------------------------------- ports


class Door:
    """A port that the system chooses, as for agents. It greets one caller."""

    def __init__(self) -> None:
        self._socket = listen_at("", 8)
        self.port: int = self._socket.getsockname()[1]

    @classmethod
    def open_if(cls, seconds: float) -> Door | None:
        """Open a port, unless `seconds` is 0 or no port can be opened."""
        with contextlib.suppress(OSError):
            return cls() if seconds else None
        return None

    def serve(self, seconds: float) -> None:
        """Greet the first caller within the time, and close."""
        self._socket.settimeout(seconds)
        with self._socket, contextlib.suppress(OSError):
            caller, _ = self._socket.accept()
            with caller:
                caller.settimeout(CONNECT_SECONDS)
                caller.sendall(GREETING)


def cannot_reach(host: str, port: int, greeting: bytes = b"") -> str:
    """Return why a port cannot be reached from here, "" if it can. greeting: the bytes that its owner must send."""
    try:
        with socket.create_connection((host, port), CONNECT_SECONDS) as connection:
            connection.settimeout(CONNECT_SECONDS)
            if greeting and connection.recv(len(greeting)) != greeting:
                return "another program answers there"
    except OSError as error:
        return reason_of(error)
    return ""


def cannot_reach_slurmds(nodes: Sequence[NodeInfo]) -> dict[str, str]:
    """Return for each node why the port of its slurmd cannot be reached from here, "" if it can."""
    with ThreadPoolExecutor(AT_ONCE) as pool:
        reasons = pool.map(lambda node: cannot_reach(node.address, node.port), nodes)
        return {node.name: reason for node, reason in zip(nodes, reasons, strict=True)}


# ------------------------------------------------------------------------------------------------------------- steps


@dataclass(frozen=True)
class Wish:
    """The wishes for the steps."""

    program: tuple[str, ...] = ()
    """The program to run on the nodes, with the question as its last word; this one by default."""
    seconds: float = 90.0
    """The time limit of each step."""
    queue: int = 10
    """Seconds to wait for the nodes."""


def own_program() -> tuple[str, ...]:
    """Return the program to run on each node: this `unicronctl`, which is at the same path there, or this Python."""
    path = os.path.abspath(sys.argv[0])
    is_program = os.path.basename(path) == "unicronctl" and os.access(path, os.X_OK)
    return (path, "doctor", "--step") if is_program else interpreter(sys.executable)


def interpreter(python: str) -> tuple[str, ...]:
    """Return the program to run with a Python in which Unicron is installed."""
    return (python, "-P", "-m", MODULE)  # -P: the user's folder must not hide our modules


@dataclass
class NodeAnswers:
    """The answers of all nodes."""

    hosts: list[HostFacts] = field(default_factory=list)
    silent: dict[str, str] = field(default_factory=dict)
    """Why a node gave no answer."""
    doors: dict[str, str] = field(default_factory=dict)
    """Why a node's port cannot be reached, "" if it can."""


def groups(nodes: Sequence[NodeInfo], marked: Sequence[str]) -> tuple[list[tuple[str, list[str]]], dict[str, str]]:
    """Return the steps to start, as (partition, nodes), and why some nodes of the marked partitions are left out.

    Idle nodes and those with room beside other jobs are in different steps: if a step cannot start at once on one of
    its nodes, it starts on none.
    """
    found: dict[tuple[str, bool], list[str]] = {}
    left_out: dict[str, str] = {}
    for node in nodes:
        partition = next((name for name in marked if name in node.partitions), None)
        if partition is None:
            continue
        is_idle = "IDLE" in node.states
        if node.heard and (is_idle or "MIXED" in node.states):
            found.setdefault((partition, is_idle), []).append(node.name)
        else:
            left_out[node.name] = why_not_idle(node)
    return [(partition, names) for (partition, _), names in found.items()], left_out


def command(partition: str, names: Sequence[str], question: Question, wish: Wish, token: str) -> list[str]:
    """Return the srun command of one step."""
    return [
        "srun",
        f"--job-name={JOB_NAME}{token}",
        f"--partition={partition}",
        f"--nodes={len(names)}",
        f"--nodelist={','.join(names)}",
        f"--ntasks={len(names)}",
        "--ntasks-per-node=1",
        "--cpus-per-task=1",
        "--mem=256M",
        f"--immediate={wish.queue}",
        f"--time={int(wish.seconds // 60) + 1}",
        "--no-kill",
        "--kill-on-bad-exit=0",
        "--wait=0",
        "--input=none",
        "--export=ALL",
        *(wish.program or own_program()),
        encode_question(question),
    ]


def _text(stream: IO[bytes]) -> IO[str]:
    return io.TextIOWrapper(stream, encoding="utf-8", errors="replace")


def _lines(stream: IO[str]) -> Iterator[str]:
    """Yield the lines of a step. A line without an end is not read into memory whole."""
    while line := stream.readline(LINE):
        yield line


def _errors(stream: IO[str]) -> list[str]:
    """Read the beginning of a step's errors. All the rest is read and dropped."""
    beginning = stream.read(MOST_ERRORS)
    while stream.read(MOST_ERRORS):
        pass
    return [beginning]


class Asking:
    """Runs the steps side by side."""

    def __init__(
        self,
        question: Question,
        wish: Wish,
        environment: Mapping[str, str],  # for srun
        reach: Mapping[str, str] | None,  # the nodes' addresses by name, if their ports are tried from here
    ) -> None:
        self._steps = Steps(JOB_NAME, environment)
        self._question, self._wish, self._reach = question, wish, reach
        if reach is not None:
            self._question = msgspec.structs.replace(question, door=DOOR_SECONDS)
        self._found = NodeAnswers()
        self._lock = threading.Lock()

    def run(self, steps: Sequence[tuple[str, list[str]]]) -> NodeAnswers:
        """Return the answers of all steps. Raises UserError if there is no srun."""
        with ThreadPoolExecutor(AT_ONCE) as doors:
            try:
                self._steps.side_by_side(lambda step: self._step(step[0], step[1], doors), steps, len(steps))
            except BaseException:
                doors.shutdown(wait=False, cancel_futures=True)
                raise
        self._found.hosts.sort(key=lambda host: host.name)
        return self._found

    def _step(self, partition: str, names: list[str], doors: ThreadPoolExecutor) -> None:
        token = secrets.token_hex(6)
        line = command(partition, names, self._question, self._wish, token)
        late, errors = threading.Event(), list[str]()
        with self._steps.running(token, line) as process:

            def end() -> None:
                late.set()
                self._steps.end(token, process)

            timer = threading.Timer(self._wish.seconds + self._wish.queue, end)
            timer.start()
            try:
                assert process.stdout is not None and process.stderr is not None
                stdout, stderr = _text(process.stdout), _text(process.stderr)
                reader = threading.Thread(target=lambda: errors.extend(_errors(stderr)), daemon=True)
                reader.start()
                self._read(_lines(stdout), set(names), doors)
                reader.join(END_SECONDS)
            finally:
                timer.cancel()
        self._note_silent(names, "".join(errors), late.is_set())

    def _read(self, lines: Iterable[str], names: set[str], doors: ThreadPoolExecutor) -> None:
        collector = Collector(names)
        heard = set[tuple[str, str]]()  # only a node's first answer of each kind counts
        for line in lines:
            found = collector.add_line(line)
            if found is None or found[:2] in heard:
                continue
            node, kind, data = found
            heard.add((node, kind))
            with contextlib.suppress(msgspec.DecodeError):
                if kind == DOOR and self._reach is not None:
                    doors.submit(self._try_door, node, msgspec.json.decode(data, type=PortNumber))
                elif kind == FACTS:
                    facts = msgspec.json.decode(data, type=HostFacts)
                    with self._lock:
                        self._found.hosts.append(msgspec.structs.replace(facts, name=node, role=COMPUTE))

    def _try_door(self, node: str, port: int) -> None:
        assert self._reach is not None
        why = cannot_reach(self._reach.get(node, node), port, GREETING)
        with self._lock:
            self._found.doors[node] = why

    def _note_silent(self, names: list[str], stderr: str, late: bool) -> None:
        lines = [line for line in stderr.splitlines() if line.strip() and "queued and waiting" not in line]
        why = f"no answer within {self._wish.seconds:g} s" if late else "srun ended without its answer"
        if lines:
            why += f": {printable(one_line(lines[-1])[:200])}"
        with self._lock:
            answered = {host.name for host in self._found.hosts}
            self._found.silent |= {name: why for name in names if name not in answered}
