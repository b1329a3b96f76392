"""SlurmClient over pyslurm, for clusters whose Slurm release an importable pyslurm was built for.

It answers in about a millisecond, the command line in ten. A pyslurm fits exactly one major release of Slurm and
misreads others, so `choose_client` compares first. pyslurm keeps to the first slurm.conf that it got, and that file's
MessageTimeout limits each of its calls.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import logging
import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from types import ModuleType
from typing import Any

from unicron_ctl.shared.slurm import squeue
from unicron_ctl.shared.slurm.command_line import CommandLineClient
from unicron_ctl.shared.slurm.host_lists import hosts
from unicron_ctl.shared.slurm.slurm_client import ElementInfo, NodeInfo, Reservation, SlurmError, current_reason
from unicron_ctl.shared.slurm.states import element_state, on_hold, parse_states
from unicron_ctl.shared.system.errors import one_line

log = logging.getLogger("unicron.slurm")


class PyslurmClient(CommandLineClient):
    """Reads through pyslurm, and so changes elements that have a record of their own; the rest by the command line.

    Elements of an array that Slurm has not split off yet share the array's record, and a change by its number would
    change them all: only the command line takes JOB_INDEX. It also does what pyslurm cannot express.
    """

    def __init__(self, pyslurm: ModuleType, env: Mapping[str, str] | None = None, timeout: float = 10.0) -> None:
        super().__init__(env, timeout)
        self._pyslurm = pyslurm
        self._own_record: dict[tuple[str, int], int] = {}

    def nodes(self) -> list[NodeInfo]:
        loaded = self._call("load nodes", self._pyslurm.Nodes.load)
        reserved = reserved_nodes(self._call("load reservations", self._pyslurm.Reservations.load).values())
        usual = 0 if all(node.slurmd_port for node in loaded.values()) else self.slurmd_port()
        return [node_info(node, tuple(reserved.get(node.name, ())), usual) for node in loaded.values()]

    def elements(self, jobs: Collection[str] | None = None) -> list[ElementInfo]:
        if jobs is not None:  # pyslurm would read the whole queue, and block the interpreter
            return super().elements(jobs)
        found = []
        for record in self._call("load jobs", self._pyslurm.Jobs.load).values():
            for element, own in elements_of(record):
                info = element_info(record, element)
                self._is_array[info.job] = record.array_id is not None
                if own:
                    self._own_record[info.job, element] = record.id
                super()._note(info)
                found.append(info)
        return found

    def _note(self, info: ElementInfo) -> None:
        if info.slurm_id != info.job or info.state != "PENDING":  # else it may share its array's record
            self._own_record[info.job, info.element] = int(info.slurm_id)
        super()._note(info)

    def down(self, node: str, reason: str) -> None:
        self._modify_node(f"set node {node} down", node, state="DOWN", reason=one_line(reason))

    def drain(self, node: str, reason: str) -> None:
        self._modify_node(f"drain node {node}", node, state="DRAIN", reason=one_line(reason))

    def resume(self, node: str) -> None:
        self._modify_node(f"resume node {node}", node, harmless="Invalid node state", state="RESUME")
        self._await_answer(node)

    def requeue(self, job: str, element: int) -> None:
        if (record := self._record(job, element)) is None:
            return super().requeue(job, element)
        with self._note_requeue(job, element):
            self._call(f"requeue {job}_{element}", record.requeue, harmless="pending execution")

    def requeue_hold(self, job: str, element: int, comment: str) -> None:
        if (record := self._record(job, element)) is None:
            return super().requeue_hold(job, element, comment)
        what = f"requeuehold {job}_{element}"
        with self._note_requeue(job, element):
            refused = self._call(what, lambda: record.requeue(hold=True), harmless="pending execution") is _REFUSAL
        if refused:
            self._call(what, record.hold)
        self._comment(job, element, comment)

    def hold(self, job: str, element: int, comment: str) -> None:
        if (record := self._record(job, element)) is None:
            return super().hold(job, element, comment)
        self._call(f"hold {job}_{element}", record.hold)
        self._comment(job, element, comment)

    def release(self, job: str, element: int, comment: str = "") -> None:
        if (record := self._record(job, element)) is None:
            return super().release(job, element, comment)
        self._call(f"release {job}_{element}", record.release)
        if comment:
            self._comment(job, element, comment)

    def pin(self, job: str, element: int, node: str | None) -> None:
        record = self._record(job, element)
        if record is None or node is None:  # pyslurm takes an empty list for "no change"
            return super().pin(job, element, node)
        self._modify(f"pin {job}_{element}", record, required_nodes=node.split(","))

    def start_now(self, job: str, element: int) -> None:
        if (record := self._record(job, element)) is None:
            return super().start_now(job, element)
        wanted = self._pyslurm.JobSubmitDescription(begin_time=self._soon(job, element))
        self._call(f"start {job}_{element}", lambda: record.modify(wanted), harmless="no longer pending execution")

    def _record(self, job: str, element: int) -> Any | None:
        """Return the pyslurm Job of an element that surely has a record of its own, which it keeps for good."""
        number = self._own_record.get((job, element))
        return None if number is None else self._pyslurm.Job(number)

    def _admin_comment(self, job: str, element: int) -> str | None:
        number = self._own_record.get((job, element))
        if number is None:
            return super()._admin_comment(job, element)
        found = self._call(f"load {job}_{element}", lambda: self._pyslurm.Job.load(number))
        return found.admin_comment or ""

    def _set_admin_comment(self, job: str, element: int, text: str) -> None:
        if (record := self._record(job, element)) is None:
            return super()._set_admin_comment(job, element, text)
        self._modify(f"comment on {job}_{element}", record, admin_comment=text)

    def _modify_node(self, what: str, node: str, harmless: str | None = None, **changes: str) -> None:
        wanted = self._pyslurm.Node(**changes)
        self._call(what, lambda: self._pyslurm.Node(node).modify(wanted), harmless)

    def _modify(self, what: str, record: Any, **changes: object) -> None:
        self._call(what, lambda: record.modify(self._pyslurm.JobSubmitDescription(**changes)))

    def _call(self, what: str, function: Callable[[], Any], harmless: str | None = None) -> Any:
        try:
            return function()
        except self._pyslurm.PyslurmError as error:
            if harmless is not None and harmless in str(error):
                return _REFUSAL
            raise SlurmError(f"{what}: {error}") from None


_REFUSAL = object()


def reserved_nodes(reservations: Iterable[Any]) -> dict[str, list[Reservation]]:
    """Return by node those of these pyslurm Reservations that name it."""
    found: dict[str, list[Reservation]] = {}
    for one in reservations:
        for node in hosts(one.nodes or ""):
            found.setdefault(node, []).append(Reservation(one.name, float(one.start_time), float(one.end_time)))
    return found


def node_info(node: Any, reservations: tuple[Reservation, ...], slurmd_port: int) -> NodeInfo:
    """Convert a pyslurm Node. slurmd_port: slurm.conf's, for a node that does not name its own."""
    gpus = sum(count for name, count in (node.configured_gres or {}).items() if name.split(":")[0] == "gpu")
    started = node.slurmd_start_time
    states = parse_states(node.state)
    return NodeInfo(
        name=node.name,
        states=states,
        reason=current_reason(states, node.reason or ""),
        address=node.address or node.name,
        port=node.slurmd_port or slurmd_port,
        slurmd_start=float(started) if started else None,
        gpus=gpus,
        partitions=tuple(node.partitions or ()),
        features=frozenset(node.active_features or ()),
        gres=_gres(node.configured_gres),
        reservations=reservations,
    )


def _gres(found: Mapping[str, int] | None) -> str:
    """Convert {"gpu:a100": 4} to "gpu:a100:4"."""
    return squeue.plain_gres(",".join(f"{name}:{count}" for name, count in (found or {}).items()))


def elements_of(record: Any) -> Iterator[tuple[int, bool]]:
    """Yield (element, whether the record is its own) for each element that a pyslurm Job stands for."""
    if record.array_tasks_waiting:
        for element in expand_indices(record.array_tasks_waiting):
            yield element, False
    else:
        yield record.array_task_id or 0, True  # pyslurm says None for 0


def expand_indices(text: str) -> list[int]:
    """Expand "0-6:2,9" to [0, 2, 4, 6, 9], as in sbatch --array; "%3" at the end (a limit) is ignored."""
    indices: list[int] = []
    for part in text.split("%")[0].split(","):
        span, _, step = part.partition(":")
        first, _, last = span.partition("-")
        indices.extend(range(int(first), int(last or first) + 1, int(step or 1)))
    return indices


def element_info(record: Any, element: int) -> ElementInfo:
    """Convert one element of a pyslurm Job, in which None stands for an empty text."""

    def text(name: str) -> str:
        return getattr(record, name) or ""

    reason = text("state_reason")
    return ElementInfo(
        job=str(record.array_id or record.id),
        element=element,
        slurm_id=str(record.id),
        state=element_state(record.state),
        node=record.allocated_nodes or None,
        reason="" if reason == "None" else reason,
        name=text("name"),
        user=text("user_name"),
        comment=text("comment"),
        restarts=record.requeue_count or 0,
        exit_code=_exit_code(record),
        uid=record.user_id,
        submitted=float(record.submit_time or 0),
        account=text("account"),
        qos=text("qos"),
        partition=text("partition"),
        features=",".join(record.constraints or ()),
        gres=_gres(record.gres_per_node),
        reservation=text("reservation"),
        excluded_nodes=frozenset(hosts(text("excluded_nodes"))),
        time_limit=_limit(record.time_limit),
        priority=record.priority or 0,
        admin_comment=text("admin_comment"),
        starts=float(record.start_time) if record.start_time else None,
        planned_nodes=frozenset(hosts(text("scheduled_nodes"))),
        array=bool(record.array_id),
        on_hold=on_hold(record.state, record.priority or 0),
    )


def _limit(minutes: int | str | None) -> float | None:
    """Return pyslurm's time limit in seconds; None for one without."""
    return 60.0 * minutes if isinstance(minutes, int) else None


def _exit_code(record: Any) -> str:
    """Return "code:signal", empty if both are 0 or unknown; not every release of pyslurm tells it."""
    code, number = (getattr(record, name, None) or 0 for name in ("exit_code", "exit_code_signal"))
    return f"{code}:{number}" if code or number else ""


# The parts of pyslurm that are read here. Up to 24.11 it has no Reservations (docs/behaviour/pyslurm.md).
NAMES = {
    "JobSubmitDescription": "",
    "PyslurmError": "",
    "slurm_init": "",
    "Jobs": "load",
    "Nodes": "load",
    "Reservations": "load",
    "Reservation": "name nodes start_time end_time",
    "Node": "name state reason address slurmd_port slurmd_start_time partitions active_features configured_gres modify",
    "Job": "load requeue hold release modify id array_id array_task_id array_tasks_waiting state state_reason name "
    "comment admin_comment allocated_nodes scheduled_nodes excluded_nodes user_id user_name account qos partition "
    "reservation constraints gres_per_node requeue_count submit_time start_time time_limit priority",
}
OLDEST = 25, 11, 2  # before, its import without a slurm.conf ends the process, whatever the environment says


def installed_pyslurm() -> str:
    """Return the release of the installed pyslurm, without importing it; "" if there is none."""
    try:
        return importlib.metadata.version("pyslurm")
    except importlib.metadata.PackageNotFoundError:
        return ""


def matching_pyslurm(
    slurm_release: str,
    load: Callable[[str], ModuleType] = importlib.import_module,
    installed: Callable[[], str] = installed_pyslurm,
) -> ModuleType | None:
    """Return pyslurm if it was built for this major release ("22.05.8" -> 22.05), can be imported and has all that is
    read of it; else None. If one is installed, one line of the log says whether it is used."""
    release = installed()
    if not release:
        return None
    why, module = _unfit(release, slurm_release), None
    if not why:
        os.environ.setdefault("PYSLURM_DISABLE_AUTO_INIT", "1")  # else importing it reads slurm.conf
        try:
            module = load("pyslurm")
        except Exception as error:  # it links against libslurm, and fails in many ways if that is another one
            why = f"it cannot be imported ({one_line(str(error))})"
        else:
            missing = _missing(module)
            why = f"it has no {', '.join(missing)}" if missing else ""
    if why:
        log.warning("Slurm is asked by its commands, and not by pyslurm %s: %s", release, why)
        return None
    log.info("Slurm is asked by pyslurm %s", release)
    return module


def _unfit(release: str, slurm_release: str) -> str:
    """Return why a pyslurm of this release is not even imported; empty if it is."""
    built_for, wanted = ([int(n) for n in re.findall(r"\d+", text)[:3]] for text in (release, slurm_release))
    if len(built_for) < 2 or built_for[:2] != wanted[:2]:
        return f"it is for another release than Slurm {slurm_release}"
    if tuple(built_for) < OLDEST:
        return f"before {'.'.join(map(str, OLDEST))} its import may end the process, and it may lack what is read of it"
    return ""


def _missing(module: ModuleType) -> list[str]:
    """Return what NAMES has and the module has not."""
    found = []
    for name, attributes in NAMES.items():
        one = getattr(module, name, None)
        if one is None:
            found.append(name)
        else:
            found += [f"{name}.{attribute}" for attribute in attributes.split() if not hasattr(one, attribute)]
    return found


def choose_client(env: Mapping[str, str] | None = None, timeout: float = 10.0) -> CommandLineClient:
    """Return the pyslurm backend if it fits the cluster's release and `env` names no other cluster than this process's
    own SLURM_CONF; else the command line's. Raises SlurmError if Slurm's programs are missing."""
    client = CommandLineClient(env, timeout)
    chosen = (env or {}).get("SLURM_CONF")
    if chosen is not None and chosen != os.environ.get("SLURM_CONF"):
        return client
    module = matching_pyslurm(client.version())
    if module is None:
        return client
    try:
        client.settings()  # without a slurm.conf, libslurm would end this process
    except SlurmError as error:
        log.warning("Slurm is asked by its commands, and not by pyslurm, for Slurm does not answer yet: %s", error)
        return client
    module.slurm_init(os.environ.get("SLURM_CONF"))
    return PyslurmClient(module, env, timeout)
