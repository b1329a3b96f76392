"""SlurmClient over squeue, scontrol and scancel, for every Slurm release whose `squeue -O` knows suffixes (20.11)."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import time
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace

from unicron_ctl.shared.slurm import queue, sizes, squeue
from unicron_ctl.shared.slurm.admin_comment import MOST, own_part, with_own
from unicron_ctl.shared.slurm.host_lists import hosts
from unicron_ctl.shared.slurm.programs import Programs
from unicron_ctl.shared.slurm.slurm_client import (
    MOST_CHARACTERS,
    ElementInfo,
    NodeInfo,
    PartitionInfo,
    Queue,
    Reservation,
    SlurmError,
    current_reason,
)
from unicron_ctl.shared.slurm.slurm_settings import SlurmSettings, parse_settings
from unicron_ctl.shared.slurm.states import LEAVES, element_state, parse_states
from unicron_ctl.shared.system.errors import one_line, shorten

log = logging.getLogger("unicron.slurm")

ANSWER_SECONDS = 3.0  # in which a running slurmd answers Slurm's ping: 0.5 to 0.7 s were seen (24.11)
SLURMD_PORT = 6818  # slurmd's own default
KILL_WAIT = 30.0  # slurm.conf's default, seconds
SHRINKS = 1_000_000  # if nothing limits how often a job gives nodes back
SETTINGS_SECONDS = 60.0  # before Slurm's configuration is read again
FEWEST_ALIKE = 256  # pending elements of an array that share a record and are read; with more nodes, two a node
LARGE = 5000  # elements, for which a row each with all texts would be megabytes
LONG = 2000  # rows of the queue; beyond that, jobs are asked for one by one, which costs slurmctld next to nothing
MOST_REMEMBERED = 100_000  # elements, and jobs
ALREADY_OVER = "already finished"
COMMENT_TRIES = 3  # if others write at the same time
HEARD_SECONDS = 0.3  # after Slurm's answer, in which every slurmd hears of a requeue
UNDER_WAY = LEAVES | {"PENDING"}  # states of an element that is being requeued or waits


class CommandLineClient:
    """Runs Slurm's own programs.

    Parameters
    ----------
    env : mapping, optional
        Added to the environment: SLURM_CONF for a private cluster.
    timeout : float
        Limits each program, in seconds.
    """

    def __init__(self, env: Mapping[str, str] | None = None, timeout: float = 10.0) -> None:
        # Variables by which people set time zones and formats must not change what is parsed here.
        hidden = ("SQUEUE_", "SCANCEL_", "SCONTROL_", "SINFO_", "SLURM_TIME_FORMAT", "SLURM_CLUSTERS")
        self._env = {name: value for name, value in os.environ.items() if not name.startswith(hidden)}
        self._env |= {"TZ": "UTC", "LC_ALL": "C"} | dict(env or {})
        self._timeout = timeout
        self._programs = Programs()
        self._most_alike = FEWEST_ALIKE
        self._long = True  # the queue may be
        self._limits, self._limits_at = dict[str, PartitionInfo](), -SETTINGS_SECONDS  # of partitions that have any
        self._release, self._warned = "", set[str]()
        self._settings, self._configured_at = SlurmSettings(), -SETTINGS_SECONDS
        self._is_array: dict[str, bool] = {}
        self._commented: set[tuple[str, int]] = set()  # elements with an AdminComment of others
        self._requeued: dict[tuple[str, int], float] = {}  # element -> when it was last requeued

    def version(self) -> str:
        """Return Slurm's release, such as "22.05.8"."""
        return self._run(["sinfo", "--version"]).split()[-1]

    def nodes(self) -> list[NodeInfo]:
        text = self._show("node")
        reserved = parse_reservations(self._show("reservation"))
        port = self.slurmd_port()
        found = {line: parse_node(line, port) for line in text.split("\n") if line.strip()}
        nodes = [node for node in found.values() if node is not None]
        for unread in [line for line, node in found.items() if node is None][:1]:
            self._warn(f"`scontrol show node` prints a line that cannot be read, and its node is unknown: {unread}")
        self._most_alike = max(FEWEST_ALIKE, 2 * len(nodes))
        return self._with_limits(nodes, reserved) if nodes else []

    def _with_limits(self, nodes: list[NodeInfo], reserved: Mapping[str, Collection[Reservation]]) -> list[NodeInfo]:
        """Add reservations and partitions' limits to the nodes. Slurm may not deal out their memory."""
        if time.monotonic() - self._limits_at >= SETTINGS_SECONDS:
            self._limits = {one.name: one for one in self.partitions() if one.limited}
            self._limits_at = time.monotonic()
        memory = "MEMORY" in self._recent().text("SelectTypeParameters").upper()
        return [
            replace(
                node,
                reservations=tuple(reserved.get(node.name, ())),
                limits=tuple(self._limits[name] for name in node.partitions if name in self._limits),
                size=node.size if memory else replace(node.size, to_give=None),
            )
            for node in nodes
        ]

    def partitions(self) -> list[PartitionInfo]:
        """Return all partitions, hidden ones included."""
        return sizes.parse_partitions(self._show("partition"))

    def hostnames(self, text: str) -> list[str]:
        """Return the names in Slurm's own notation, such as n[1-8],login2. Raises SlurmError for wrong ones."""
        text = "".join(text.split())
        names = self._run(["scontrol", "show", "hostnames", text]).split() if text else []
        if text and not names:
            raise SlurmError(f"{text!r} is no list of nodes: write names like n1,n2 or n[1-8]")
        return names

    def elements(self, jobs: Collection[str] | None = None) -> list[ElementInfo]:
        if jobs is not None and not jobs:
            return []
        lots = [None] if jobs is None else [[job] for job in sorted(jobs)] if self._long else [sorted(jobs)]
        found = [info for lot in lots for info in self._elements(lot)]
        self._forget(found)
        return found

    def _elements(self, jobs: list[str] | None) -> list[ElementInfo]:
        """List all elements, or those of some jobs. slurmctld looks a single job up directly."""
        which = ["--jobs", ",".join(jobs)] if jobs else []
        try:
            listing = self._squeue("--array", *which, "-o", squeue.FACTS_FORMAT).decode(errors="replace")
            facts = squeue.parse_facts(listing, self._most_alike)
            large = listing.count("\n") > LARGE
            texts = self._texts(which, [fact.key for fact in facts], large)
            common = self._common_texts(which) if large else {}
        except SlurmError as error:
            if jobs and "Invalid job id" in str(error):
                return []
            raise
        found = []
        for fact in facts:
            if fact.key in texts:  # else it ended, or began, between the two listings
                self._is_array[fact.info.job] = fact.is_array
                row = {**common.get(fact.info.job, {}), **texts[fact.key]}
                found.append(squeue.complete(fact, row))
                self._note(found[-1])
        return found

    def others(self, but: Collection[str] = ()) -> Queue:
        self._release = self._release or "".join(self._run(["squeue", "--version"]).split()[-1:])
        for columns in queue.forms(self._release):
            answer = self._squeue("--sort=-p", "-O", squeue.columns_format(columns))
            if (found := queue.parse(answer, columns, but)) is not None:
                self._long = found.rows > LONG
                return found
            self._warn(f"squeue of Slurm {self._release} prints the whole queue in other columns than it was asked for")
        raise SlurmError(f"squeue: cannot read {answer[:80]!r}")

    def _warn(self, text: str) -> None:
        """Log a warning once."""
        if text not in self._warned:
            self._warned.add(text)
            log.warning("%s", shorten(one_line(text), MOST_CHARACTERS))

    def _forget(self, listed: list[ElementInfo]) -> None:
        """Forget elements that are gone."""
        if len(self._requeued) > MOST_REMEMBERED:
            there = {(info.job, info.element) for info in listed}
            self._requeued = {key: at for key, at in self._requeued.items() if key in there}
        if len(self._commented) > MOST_REMEMBERED:
            self._commented &= {(info.job, info.element) for info in listed}
        if len(self._is_array) > MOST_REMEMBERED:
            jobs = {info.job for info in listed}
            self._is_array = {job: is_array for job, is_array in self._is_array.items() if job in jobs}

    def _note(self, info: ElementInfo) -> None:
        """Remember an element that was listed."""
        text, key = info.admin_comment, (info.job, info.element)
        if text and (own_part(text) != text or text.endswith(squeue.CUT)):  # others' words, or possibly some
            self._commented.add(key)
        else:
            self._commented.discard(key)
        self._note_restart(info)

    def _note_restart(self, info: ElementInfo) -> None:
        """Note a requeue by a user or by Slurm itself, at the time at which the element was submitted anew."""
        if info.restarts:
            key = info.job, info.element
            self._requeued[key] = max(info.submitted, self._requeued.get(key, 0.0))

    def private_data(self) -> frozenset[str]:
        """Return the words of Slurm's PrivateData in lower case: users see only their own of these (slurm.conf(5))."""
        return frozenset(word.lower() for word in self._recent().words("PrivateData"))

    def kill_wait(self) -> float:
        found = self._recent().seconds("KillWait")
        if found is None:
            self._warn(f"`scontrol show config` tells no KillWait: {KILL_WAIT:g} s are taken for it")
        return KILL_WAIT if found is None else found

    def grace(self) -> dict[str, float]:
        return {partition.name: partition.grace for partition in self.partitions() if partition.grace}

    def shrinks(self) -> int:
        if "disable_job_shrink" in self._recent().words("SchedulerParameters"):
            return 0
        return SHRINKS if "slurmdbd" in self._recent().text("AccountingStorageType") else 1

    def domains(self) -> dict[str, str]:
        # Without a name only the default topology is shown. Releases without partitions' topologies would take a name
        # for a node's (docs/behaviour/slurm-formats.md).
        found = parse_topology(self._show("topology"))
        for name in sorted({partition.topology for partition in self.partitions()} - {""}):
            found = parse_topology(self._show("topology", name)) | found
        return found

    def return_to_service(self) -> int:
        """Return Slurm's ReturnToService: 2 if a node set down returns once its slurmd registers (slurm.conf(5))."""
        return int(self._recent().seconds("ReturnToService") or 0)

    def slurmd_port(self) -> int:
        """Return the port of slurmds whose node does not name its own; the first one of a range in slurm.conf."""
        return int(self._recent().seconds("SlurmdPort") or SLURMD_PORT)

    def settings(self) -> SlurmSettings:
        """Return all of Slurm's settings, as slurmctld has them now."""
        return parse_settings(self._run(["scontrol", "show", "config"]))

    def admin_level(self, user: str) -> str:
        """Return the user's AdminLevel in slurmdbd: None, Operator or Administrator; "" for an unknown user."""
        command = ["sacctmgr", "--noheader", "--parsable2", "--readonly", "show", "user", user, "format=adminlevel"]
        return next(iter(self._run(command).split()), "")

    def _recent(self) -> SlurmSettings:
        """Return Slurm's settings, as slurmctld had them in the last minute."""
        if time.monotonic() - self._configured_at >= SETTINGS_SECONDS:
            self._settings, self._configured_at = self.settings(), time.monotonic()
        return self._settings

    def _common_texts(self, which: list[str]) -> dict[str, dict[str, str]]:
        """Return by job what all elements of an array have in common: squeue prints its pending ones in one row."""
        answer = self._squeue(*which, "-O", squeue.columns_format(squeue.ALL_COLUMNS))
        own = {name for name, _ in squeue.OWN_COLUMNS}
        rows = squeue.parse_columns(answer, squeue.ALL_COLUMNS) or {}
        return {job: {name: text for name, text in row.items() if name not in own} for (job, _), row in rows.items()}

    def _texts(self, which: list[str], wanted: list[squeue.Key], large: bool) -> dict[squeue.Key, dict[str, str]]:
        """Read the second listing; if `large`, only texts that may differ. Raises SlurmError for other columns."""
        first = squeue.OWN_COLUMNS if large else squeue.ALL_COLUMNS
        for columns in (first, squeue.NEEDED_COLUMNS):  # if texts break the columns: without them
            answer = self._squeue("--array", *which, "-O", squeue.columns_format(columns))
            if (found := squeue.parse_columns(answer, columns, wanted)) is not None:
                return found
            self._warn("squeue prints jobs in other columns than it was asked for: what they ask for is not known")
        raise SlurmError(f"squeue: cannot read {answer[:80]!r}")

    def _squeue(self, *form: str) -> bytes:
        # With fed_display squeue shows the jobs of all clusters of a federation, whose nodes may have equal names.
        return self._output(["squeue", "--local", "--noheader", "--all", "--states=all", *form])

    def _show(self, *words: str) -> str:
        return self._run(["scontrol", "--all", "--oneliner", "show", *words])

    def down(self, node: str, reason: str) -> None:
        self._change(["scontrol", "update", f"NodeName={node}", "State=DOWN", f"Reason={one_line(reason)}"])

    def drain(self, node: str, reason: str) -> None:
        self._change(["scontrol", "update", f"NodeName={node}", "State=DRAIN", f"Reason={one_line(reason)}"])

    def resume(self, node: str) -> None:
        # Slurm calls this an invalid state change for a node that is in service already.
        self._change(["scontrol", "update", f"NodeName={node}", "State=RESUME"], harmless=("Invalid node state",))
        self._await_answer(node)

    def _await_answer(self, node: str) -> None:
        """Wait, for up to ANSWER_SECONDS, until Slurm has heard the node's slurmd after a resume."""
        until = time.monotonic() + ANSWER_SECONDS
        while time.monotonic() < until:
            found = parse_node(self._show("node", node).strip())
            if found is None or "NOT_RESPONDING" not in found.states or "DOWN" in found.states:
                return
            time.sleep(0.1)

    def requeue(self, job: str, element: int) -> None:
        # Slurm 22.05 accepts a second requeue during the first, and may then let the element end as FAILED.
        if self._state(job, element) in UNDER_WAY:
            return
        with self._note_requeue(job, element):
            self._change(["scontrol", "requeue", self._id(job, element)], harmless=("Job is pending execution",))

    def requeue_hold(self, job: str, element: int, comment: str) -> None:
        with self._note_requeue(job, element):
            command = ["scontrol", "requeuehold", self._id(job, element)]
            refused = self._change(command, harmless=("Job is pending execution",))
        if refused:
            self._change(["scontrol", "hold", self._id(job, element)])
        self._comment(job, element, comment)

    def hold(self, job: str, element: int, comment: str) -> None:
        self._change(["scontrol", "hold", self._id(job, element)])
        self._comment(job, element, comment)

    def release(self, job: str, element: int, comment: str = "") -> None:
        self._change(["scontrol", "release", self._id(job, element)])
        if comment:
            self._comment(job, element, comment)

    def pin(self, job: str, element: int, node: str | None) -> None:
        self._change(["scontrol", "update", f"JobId={self._id(job, element)}", f"ReqNodeList={node or ''}"])

    def shrink(self, job: str, nodes: str) -> None:
        self._change(["scontrol", "update", f"JobId={job}", f"NodeList={nodes}"])

    def start_now(self, job: str, element: int) -> None:
        command = ["scontrol", "update", f"JobId={self._id(job, element)}", f"StartTime={self._soon(job, element)}"]
        self._change(command, harmless=("no longer pending execution",))

    def _soon(self, job: str, element: int) -> str:
        """Return the earliest start of an element: after the second in which slurmd heard of its requeue. slurmd takes
        credentials of that second for revoked ("Job credential revoked"), and Slurm 22.05 then ends the element as
        FAILED."""
        heard = self._requeued.get((job, element), 0.0) + HEARD_SECONDS
        wait = int(heard) + 1 - int(time.time())
        return f"now+{wait}" if wait > 0 else "now"

    @contextlib.contextmanager
    def _note_requeue(self, job: str, element: int) -> Iterator[None]:
        """Note when an element was requeued, whether Slurm has answered or not."""
        try:
            yield
        finally:
            self._requeued[job, element] = time.time()

    def cancel(self, job: str, element: int | None = None, comment: str = "") -> None:
        if comment and element is not None:  # first, since squeue soon forgets a cancelled element
            self._comment(job, element, comment)
        self._change(["scancel", job if element is None else self._id(job, element)])

    def comment(self, job: str, element: int, text: str) -> None:
        own = one_line(text)
        before = self._admin_comment(job, element)
        for _ in range(COMMENT_TRIES):
            wanted = with_own(before, own) if before is not None else before
            if wanted is None or wanted == before:
                return
            try:
                self._set_admin_comment(job, element, wanted)
            except SlurmError as error:
                if ALREADY_OVER in str(error):  # then Slurm changes nothing any more
                    return
                raise
            after = self._admin_comment(job, element)
            if after == wanted:
                return
            before = after  # somebody else has written at this moment

    def _comment(self, job: str, element: int, comment: str) -> None:
        """Write a comment beside what others wrote. If Slurm refuses it, the action itself is done all the same."""
        with contextlib.suppress(SlurmError):
            known = self._admin_comment(job, element) if (job, element) in self._commented else ""
            if known is not None:
                self._set_admin_comment(job, element, with_own(known, one_line(comment), first=True))

    def _admin_comment(self, job: str, element: int) -> str | None:
        """Return the whole AdminComment; None if it is too long to be read, or Slurm does not list the element."""
        width = 2 * MOST
        cell = self._squeue("--jobs", self._id(job, element), "--array", "-O", f"admin_comment:{width}")
        if not cell or cell[width - 1 : width] not in (b" ", b""):
            return None
        return squeue.value_or_empty(os.fsdecode(cell[:width]).rstrip(" \n"))

    def _set_admin_comment(self, job: str, element: int, text: str) -> None:
        self._change(["scontrol", "update", f"JobId={self._id(job, element)}", f"AdminComment={text}"])

    def _id(self, job: str, element: int) -> str:
        """Return the element's name for Slurm: JOB_INDEX; JOB for a plain job, of which Slurm knows no elements."""
        if element == 0 and job not in self._is_array:
            index = self._squeue("--jobs", job, "-o", "%K").split()
            self._is_array[job] = bool(index) and index[0] != b"N/A"
        return f"{job}_{element}" if self._is_array.get(job, True) else job

    def _state(self, job: str, element: int) -> str:
        """Return the element's state, "" if Slurm does not list it."""
        found = self._squeue("--jobs", self._id(job, element), "-o", "%T").split()
        return element_state(found[0].decode()) if found else ""

    def _change(self, command: list[str], harmless: tuple[str, ...] = ()) -> bool:
        """Run a command that changes something; True if Slurm refused it for a harmless reason."""
        try:
            self._run(command)
        except SlurmError as error:
            if any(text in str(error) for text in harmless):
                return True
            raise
        return False

    def _run(self, command: list[str]) -> str:
        return self._output(command).decode(errors="replace")

    def _output(self, command: list[str]) -> bytes:
        what = " ".join(command[:3])
        try:
            done = self._programs.run(command, self._env, self._timeout)
        except FileNotFoundError:
            raise SlurmError(f"{command[0]} not found; install with: apt-get install slurm-client") from None
        if done.returncode != 0:
            why = done.stderr.decode(errors="replace").strip() or f"exit status {done.returncode}"
            raise SlurmError(f"{what}: {why}")
        return done.stdout


_NODE_FIELD = re.compile(
    r"(?:^|(?<= ))(NodeName|NodeAddr|Port|State|SlurmdStartTime|Gres|Partitions|ActiveFeatures"
    r"|CPUEfctv|CPUTot|Sockets|CoresPerSocket|ThreadsPerCore|RealMemory|MemSpecLimit|TmpDisk)="
    r"(.*?)(?=\s+[A-Z][A-Za-z]*=|\s*$)"
)


def parse_node(line: str, slurmd_port: int = SLURMD_PORT) -> NodeInfo | None:
    """Read one line of `scontrol -o show node`; None without name or state. slurmd_port: slurm.conf's, since scontrol
    prints a node's port only if it differs."""
    # Values may hold spaces and equal signs (OS, Comment, Reason), so the first of each key counts; those that people
    # can write come after all that are read here, except Reason itself.
    fields: dict[str, str] = {}
    for key, value in _NODE_FIELD.findall(line):
        fields.setdefault(key, value)
    if not line.startswith("NodeName=") or "State" not in fields:
        return None
    reason = re.search(r"\sReason=(.*?)(?:\s\[[^\[\]@]*@[^\[\]]*\]|$)", line.rstrip())
    name = fields["NodeName"]
    gres = squeue.value_or_empty(fields.get("Gres", ""))
    states = parse_states(fields["State"])
    return NodeInfo(
        name=name,
        states=states,
        reason=current_reason(states, reason[1].strip() if reason else ""),
        address=fields.get("NodeAddr", name),
        port=int(fields["Port"]) if fields.get("Port", "").isdecimal() else slurmd_port,
        slurmd_start=squeue.parse_time(fields.get("SlurmdStartTime", "None")),
        gpus=count_gpus(gres),
        partitions=_split(fields.get("Partitions", "")),
        features=frozenset(_split(fields.get("ActiveFeatures", ""))),
        gres=re.sub(r"\([^)]*\)", "", gres),
        size=sizes.node_size(fields),
    )


def _split(text: str) -> tuple[str, ...]:
    return tuple(part for part in squeue.value_or_empty(text).split(",") if part)


def parse_reservations(text: str) -> dict[str, list[Reservation]]:
    """Read `scontrol -o show reservation`: node -> the reservations that name it."""
    found: dict[str, list[Reservation]] = {}
    for line in text.split("\n"):
        fields = dict(re.findall(r"(?:^|(?<= ))([A-Z][A-Za-z]*)=(\S*)", line))
        starts, ends = (squeue.parse_time(fields.get(name, "")) for name in ("StartTime", "EndTime"))
        if "ReservationName" in fields and starts is not None and ends is not None:
            reserved = Reservation(fields["ReservationName"], starts, ends)
            for node in hosts(squeue.value_or_empty(fields.get("Nodes", ""))):
                found.setdefault(node, []).append(reserved)
    return found


def parse_topology(text: str) -> dict[str, str]:
    """Read `scontrol -o show topology`: node -> its (first) leaf switch or block (topology/tree, topology/block)."""
    found: dict[str, str] = {}
    for line in text.split("\n"):
        fields = dict(re.findall(r"(?:^|(?<= ))([A-Z][A-Za-z]*)=(\S*)", line))
        name = fields.get("BlockName", "") or (fields.get("SwitchName", "") if fields.get("Level") == "0" else "")
        for node in hosts(squeue.value_or_empty(fields.get("Nodes", ""))) if name else ():
            found.setdefault(node, name)
    return found


def count_gpus(gres: str) -> int:
    """Count the GPUs in "gpu:a100:4(S:0-1),gpu:2,shard:8": 6."""
    total = 0
    for item in re.sub(r"\([^)]*\)", "", gres).split(","):
        words = item.strip().split(":")
        if words[0] == "gpu":
            total += int(words[-1]) if words[-1].isdecimal() else 1
    return total
