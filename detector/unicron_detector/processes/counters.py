"""Counts the work of a plain program, in a page of memory that its agent reads: optimizer steps, waits for other ranks,
saves, heartbeats.

The script is not changed. The zygote calls :func:`install` in each fork. In a process that starts cold, `import torch`
loads this file as one of its backends (the entry point `torch.backends`), from a folder that the agent puts on
PYTHONPATH. So it may import only the standard library, and torch if the script has imported it.

A hook costs about a microsecond, writes to the page, and takes no lock. If there is a process group, one thread waits
for the agent's questions, and answers with the progress of the collectives from torch's flight recorder.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import importlib.util
import inspect
import json
import mmap
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

NAME = "unicron_counters"  # torch finds this module by this name, without the project's folders
PAGE, ASKS = "UNICRON_COUNTERS", ".ask"  # the page's path in the environment; the pipe beside it
BYTES, TEXT = 32768, 1024  # size of a page, and the place of its text
FIELDS = (
    "version",
    "pid",  # the process that counts: the first one that calls a hook
    "began",  # when it was installed; all times are nanoseconds on the monotonic clock
    "done",  # iterations
    "done_at",  # end of the last one
    "waited_then",  # `waited` at that time
    "outside_then",
    "wait",  # why it waits for other ranks now: an index of WAITS
    "waits",  # number of these waits
    "waited",  # their total time
    "outside",  # nesting depth in saves and sections outside an iteration
    "outside_for",
    "saves",  # finished saves
    "saved_done",  # iterations at the end of the last one
    "heartbeats",
    "answers",  # number of answers to the agent
    "length",  # bytes of the text: an answer, or the reason why something is not counted
)
AT = {name: number for number, name in enumerate(FIELDS)}
VERSION = 1
WAITS = ("", "backward", "a collective")
# Undocumented parts of torch. If one of them differs in a release, the hook that needs it is left out.
SEAMS = (
    ("torch.autograd", "backward", "tensors grad_tensors retain_graph create_graph grad_variables inputs"),
    ("torch.distributed", "Work.wait", None),  # written in C++
    ("torch._C._distributed_c10d", "_dump_fr_trace_json", None),
)
END, END_SECONDS = b".", 1.0  # the question that ends the thread, and how long to wait for its end
MOST_GROUPS = 64  # in one answer
MONITOR = "nvidia_resiliency_ext.fault_tolerance.rank_monitor_client"

install_later = False  # True in a zygote, whose forks install
_DONE, _DONE_AT, _WAITED, _WAITED_THEN = AT["done"], AT["done_at"], AT["waited"], AT["waited_then"]
_WAIT, _WAITS, _OUTSIDE, _OUTSIDE_FOR, _OUTSIDE_THEN, _PID = (
    AT[name] for name in ("wait", "waits", "outside", "outside_for", "outside_then", "pid")
)
_now, _thread = time.monotonic_ns, threading.get_ident


class Counters:
    """The page for the process that counts. Times in nanoseconds."""

    def __init__(self, path: str) -> None:
        with open(path, "r+b") as file:
            self._map = mmap.mmap(file.fileno(), BYTES)
        self.page = memoryview(self._map).cast("Q")
        self._path = path
        self.mine: bool | None = None  # whether this process counts; None until that is decided
        self.thread = 0  # the thread that trains
        self._round: set[int] = set()  # optimizers that have stepped in this iteration
        self.page[AT["version"]] = VERSION

    def claim(self) -> bool:
        """Whether this process counts: the first living process of the rank that trains."""
        if self.mine is None:
            owner = self.page[_PID]
            self.mine = owner in (0, os.getpid()) or not os.path.exists(f"/proc/{owner}")
            if self.mine:
                for number in range(AT["began"], AT["heartbeats"]):
                    self.page[number] = 0
                self.page[AT["began"]], self.page[_PID] = _now(), os.getpid()
                self.thread = _thread()
                self._answer_questions()
        return self.mine

    def after_fork(self) -> None:
        """Stop counting in a child of the process that counts, such as a worker that loads data."""
        if self.mine:
            self.mine, self.thread = False, 0

    # ------------------------------------------------------------ what is counted
    def on_step(self, optimizer: Any, arguments: Any, keywords: Any) -> None:
        """Count a step of an optimizer. An iteration ends with the first step of a round. With two optimizers, as in a
        GAN, a new round begins when one of them steps again."""
        if not self.mine and not self.claim():
            return
        key, steps = id(optimizer), self._round
        if key in steps:
            steps.clear()
        elif steps:
            steps.add(key)
            return
        steps.add(key)
        page = self.page
        page[_WAITED_THEN], page[_OUTSIDE_THEN] = page[_WAITED], page[_OUTSIDE_FOR]
        page[_DONE_AT] = _now()
        page[_DONE] += 1

    def waiting(self, function: Callable[..., Any], kind: int) -> Callable[..., Any]:
        """Wrap the function so that its time counts as waiting for other ranks."""
        page = self.page

        def wrapper(*arguments: Any, **keywords: Any) -> Any:
            if page[_WAIT] or (_thread() != self.thread and (self.mine is not None or not self.claim())):
                return function(*arguments, **keywords)
            page[_WAIT] = kind
            page[_WAITS] += 1
            began = _now()
            try:
                return function(*arguments, **keywords)
            finally:
                page[_WAITED] += _now() - began
                page[_WAIT] = 0

        return unseen(wrapper, function)

    def saving(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap the function so that its time counts as a save."""

        def wrapper(*arguments: Any, **keywords: Any) -> Any:
            if not self.mine or _thread() != self.thread:
                return function(*arguments, **keywords)
            with self.outside():
                result = function(*arguments, **keywords)
            self.page[AT["saves"]] += 1
            self.page[AT["saved_done"]] = self.page[_DONE]
            return result

        return unseen(wrapper, function)

    @contextlib.contextmanager
    def outside(self) -> Iterator[None]:
        """Count the time in the body as outside an iteration."""
        page, began = self.page, _now()
        page[_OUTSIDE] += 1
        try:
            yield
        finally:
            page[_OUTSIDE] -= 1
            page[_OUTSIDE_FOR] += _now() - began

    def beat(self) -> None:
        """Count a heartbeat of the script."""
        if self.mine or self.claim():
            self.page[AT["heartbeats"]] += 1

    def section(self, by: int) -> None:
        """Note that a section outside an iteration begins (1) or ends (-1)."""
        if self.mine or self.claim():
            self.beat()
            self.page[_OUTSIDE] = max(0, self.page[_OUTSIDE] + by)

    def put_text(self, text: str) -> None:
        data = text.encode(errors="replace")[: BYTES - TEXT]
        self._map[TEXT : TEXT + len(data)] = data
        self.page[AT["length"]] = len(data)

    # ------------------------------------------------------------ questions
    def _answer_questions(self) -> None:
        """Start a thread that answers the agent's questions, if there is a process group."""
        distributed = sys.modules.get("torch.distributed")
        if distributed is None or not distributed.is_available() or not distributed.is_initialized():
            return
        with contextlib.suppress(OSError, RuntimeError):
            pipe = os.open(self._path + ASKS, os.O_RDWR | os.O_CLOEXEC)
            thread = threading.Thread(target=self._answer, args=(pipe,), name="unicron-counters", daemon=True)
            thread.start()
            atexit.register(self._end_answers, pipe, thread)

    def _end_answers(self, pipe: int, thread: threading.Thread) -> None:
        """End the thread: an interpreter that exits while a thread is in torch aborts. A fork has no such thread."""
        if self.mine:
            os.write(pipe, END)
            thread.join(END_SECONDS)

    def _answer(self, pipe: int) -> None:
        while END not in os.read(pipe, 64):
            try:
                self.put_text(json.dumps(collectives()))
            except Exception as error:  # a question must not end the script
                self.put_text(json.dumps({"error": f"{type(error).__name__}: {error}"[:200]}))
            self.page[AT["answers"]] += 1


def unseen(wrapper: Callable[..., Any], function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the wrapper with the function's name and hidden from torch's compiler."""
    _keep_from_compiler(wrapper)
    wrapper._torchdynamo_disable = True  # type: ignore[attr-defined]
    for name in ("__module__", "__name__", "__qualname__", "__doc__"):
        with contextlib.suppress(AttributeError):
            setattr(wrapper, name, getattr(function, name))
    wrapper.__wrapped__ = function  # type: ignore[attr-defined]
    return wrapper


def _keep_from_compiler(function: Any) -> None:
    """Keep torch's compiler, which goes by the file's name, from tracing the function: it would fail."""
    function.__code__ = function.__code__.replace(co_filename=f"<frozen importlib.{NAME}>")


def collectives(since: int = 0) -> dict[str, list[Any]]:
    """Read the flight recorder: group -> [collectives that this rank has begun, that have ended, the last in words].
    since: of groups with a collective after this time, in nanoseconds."""
    from torch._C import _distributed_c10d as c10d

    progress: dict[str, list[Any]] = {}
    for name in ("_dump_nccl_trace_json", "_dump_fr_trace_json"):
        dump = getattr(c10d, name, None)
        found = latest(json.loads(dump(True, False)), since) if dump is not None else {}
        for group, one in found.items():  # a group with two backends is in both
            progress[group] = max(one, progress.get(group, one), key=lambda item: item[0])
    return dict(list(progress.items())[-MOST_GROUPS:])


def latest(trace: dict[str, Any], since: int = 0) -> dict[str, list[Any]]:
    """Return the progress in each group of a flight recorder's trace. A group that was made again under the same name
    has a higher id and counts from 1, so only the newest of that name counts."""
    found: dict[str, tuple[tuple[int, int], list[Any]]] = {}
    for entry in trace.get("entries", ()):
        (group, about), number = entry["process_group"], entry["collective_seq_id"]
        order = entry["pg_id"], number
        if entry["is_p2p"] or entry.get("time_created_ns", 0) < since or (group in found and order < found[group][0]):
            continue
        status = trace.get("pg_status", {}).get(str(entry["pg_id"]), {})
        called = f" of {about}" if about not in ("", "undefined") else ""
        words = f"{entry['profiling_name']}{called} {entry['input_sizes']}"[:80]
        # These two count sends and receives as well, and the numbers of the entries do not.
        enqueued, completed = (int(status.get(f"last_{what}_collective", 0)) for what in ("enqueued", "completed"))
        found[group] = order, [number, number - (completed < enqueued), words]
    return {group: progress for group, (_, progress) in found.items()}


# ---------------------------------------------------------------- installing it
def _lacks(module: str, name: str, parameters: str | None) -> bool:
    """Whether torch lacks the function, or has it with other parameters."""
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    if found is None:
        return True
    return parameters is not None and list(inspect.signature(found).parameters) != parameters.split()


def install() -> None:
    """Start to count if the agent asks for it. Never raises, because counting must not break a program."""
    path = None if install_later else os.environ.get(PAGE)
    if path is None:
        return
    try:
        _beside("stacks").register_from_environment()
        _hook(Counters(path))
        _beside("step_signals").spare_helpers()
    except Exception as error:
        with contextlib.suppress(Exception):
            Counters(path).put_text(f"{type(error).__name__}: {error}"[:200])


def _beside(name: str) -> Any:
    """Import a module of this folder, which is not on sys.path."""
    where = os.path.join(os.path.dirname(os.path.realpath(__file__)), f"{name}.py")
    spec = importlib.util.spec_from_file_location(f"_unicron_{name}", where)
    assert spec is not None and spec.loader is not None
    module = sys.modules[f"_unicron_{name}"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _hook(counters: Counters) -> None:
    import torch
    from torch.optim.optimizer import register_optimizer_step_post_hook

    missing = [f"{module}.{name}" for module, name, takes in SEAMS if _lacks(module, name, takes)]

    def on_step(optimizer: Any, arguments: Any, keywords: Any) -> None:
        counters.on_step(optimizer, arguments, keywords)

    for method in (Counters.on_step, Counters.claim):  # called by hooks
        _keep_from_compiler(method)
    register_optimizer_step_post_hook(unseen(on_step, on_step))
    torch.save = counters.saving(torch.save)
    if "torch.autograd.backward" not in missing:
        torch.autograd.backward = counters.waiting(torch.autograd.backward, 1)
    if "torch.distributed.Work.wait" not in missing:
        work: Any = torch.distributed.Work
        work.wait = counters.waiting(work.wait, 2)
    os.register_at_fork(after_in_child=counters.after_fork)
    sys.meta_path.insert(0, _Monitors(counters))
    if missing:
        counters.put_text(f"torch {torch.__version__} has no {', '.join(missing)} as this release knows it")


# ---------------------------------------------------------------- others' heartbeats
class _Monitors:
    """Waits for the import of NVRx's client. Its calls count as progress, and work without NVRx's launcher."""

    def __init__(self, counters: Counters) -> None:
        self._counters, self._busy = counters, False

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != MONITOR or self._busy:
            return None
        self._busy = True
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._busy = False
        if spec is not None and spec.loader is not None:
            execute, counters = spec.loader.exec_module, self._counters

            def exec_module(module: Any) -> None:
                execute(module)
                with contextlib.suppress(Exception):
                    count_heartbeats(module, counters)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def count_heartbeats(module: Any, counters: Counters) -> None:
    """Count the calls of this `rank_monitor_client`."""
    client: Any = module.RankMonitorClient

    def counting(method: Callable[..., Any], count: Callable[..., None]) -> Callable[..., Any]:
        def wrapper(self: Any, *arguments: Any, **keywords: Any) -> Any:
            count(*arguments, **keywords)
            return method(self, *arguments, **keywords)

        return wrapper

    def is_step(section: str) -> bool:
        return any(word in section.lower() for word in ("step", "iter", "train"))

    client.send_heartbeat = counting(client.send_heartbeat, counters.beat)
    client.start_section = counting(client.start_section, lambda section: counters.section(not is_step(section)))
    client.end_section = counting(client.end_section, lambda section: counters.section(-(not is_step(section))))
    client.end_all_sections = counting(client.end_all_sections, lambda: counters.section(-(1 << 30)))
    if module.FT_RANK_MONITOR_IPC_SOCKET_ENV_VAR in os.environ:
        return

    def connect(self: Any, num_warmup_iters: int | None = None) -> None:
        """Stands in for the connection to the launcher's server, with the answers that the server would give."""
        import socket

        self.rank_monitor_socket, self._unicron_peer = socket.socketpair()
        self.cfg = importlib.import_module(f"{module.__package__}.config").FaultToleranceConfig()

    client._connect_to_rmon_server = connect
    module.write_object_to_ipc_socket = lambda message, line: None
    module.read_obj_from_ipc_socket = lambda line: module.OkMsg()
