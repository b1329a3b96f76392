"""The zygote: a process that has imported the modules of a job's script, and forks a rank of itself on demand
(docs/design/warm-processes.md).

    python [FLAGS] zygote.py DESCRIPTOR SCRIPT|-m MODULE [ARGUMENTS]

It is run by its path with the job's own interpreter and environment, so it imports only the standard library itself.
The SOCK_SEQPACKET socket DESCRIPTOR carries one task, then requests; every message is a JSON map. A request has four
descriptors: a file with the rank's environment and arguments, its standard output, its standard error, and the pipe
from which the rank reads whether it may begin. The answer is the pid, or the reason why this rank has to start cold.
The rank is forked twice: it is then a child of the agent, which is a subreaper.
"""

from __future__ import annotations

import sys

if __name__ == "__main__" and not sys.flags.safe_path:
    del sys.path[0]  # this file's folder, whose modules would hide others

import ast
import contextlib
import ctypes
import gc
import importlib
import importlib.machinery
import importlib.util
import json
import os
import re
import runpy
import signal
import socket
import time
import types
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from typing import Any, NoReturn

FORMAT = 1  # of the messages between it and the agent (unicron_detector/formats.py)
PR_SET_PDEATHSIG = 1
ANSWER_BYTES = 65536
ADOPTED_SECONDS = 2.0  # for the agent to become the rank's parent
# Variables that C code or the interpreter reads, so that their reading cannot be seen.
READ_IN_C = re.compile(r"(PYTHON|LD_|LC_|OMP_|MKL_|KMP_|GOMP_|OPENBLAS_|MALLOC_|GLIBC_|ASAN_)\w+|LANG|TZ|PATH")
# Module -> what it imports at its first use: torch with the first optimizer, for a third of a second.
LATER = {"torch.optim": "torch._dynamo"}
LAUNCHER = "unicron.transition.megatron_lm"  # runs the script that is its first argument


class Cold(Exception):
    """Ranks have to start cold; the text gives the reason."""


def beside(name: str) -> Any:
    """Import a module of this folder, which is not on sys.path."""
    path = os.path.join(os.path.dirname(os.path.abspath(__file__)), f"{name}.py")
    spec = importlib.util.spec_from_file_location(f"_unicron_{name}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


forkable, counters, step_signals = beside("forkable"), beside("counters"), beside("step_signals")


# ---------------------------------------------------------------- what is imported
def leading_imports(source: str, name: str) -> list[ast.stmt]:
    """Return the import statements at the top of a script, up to the first statement that is no import, docstring or
    assignment of a constant. The constant UNICRON_PRELOAD, a tuple of names, stands for the import of these modules.
    Raises SyntaxError."""
    imports: list[ast.stmt] = []
    for statement in ast.parse(source, name).body:
        match statement:
            case ast.ImportFrom(module="__future__") | ast.Expr(value=ast.Constant()):
                pass
            case ast.Import() | ast.ImportFrom():
                imports.append(statement)
            case ast.Assign(targets=[ast.Name(id="UNICRON_PRELOAD")], value=ast.Tuple() as value) if constant(value):
                names = ast.parse(f"import {', '.join(map(str, ast.literal_eval(value)))}", name).body
                imports += [ast.increment_lineno(each, statement.lineno - 1) for each in names]
            case ast.Assign(value=value) | ast.AnnAssign(value=ast.expr() as value) if constant(value):
                pass
            case _:
                break
    return imports


def constant(value: ast.expr) -> bool:
    """Whether the value is a literal."""
    try:
        ast.literal_eval(value)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return False
    return True


def lead_path(words: list[str], before: str = "") -> str:
    """Put into sys.path, in place of `before`, what the interpreter puts first for `SCRIPT ...` or `-m MODULE ...`."""
    first = os.getcwd() if words[0] == "-m" else os.path.dirname(os.path.realpath(words[0]))
    if not sys.flags.safe_path:
        if before in sys.path:  # imports may have inserted entries before it
            sys.path[sys.path.index(before)] = first
        else:
            sys.path.insert(0, first)
    return first


class Reads(os._Environ[str]):
    """os.environ while the imports run. Copies and loops count as reads of all variables."""

    seen: dict[str, str | None] = {}  # the variables that they read; None for unset ones
    written: set[str] = set()  # those that they wrote

    def __getitem__(self, name: str) -> str:
        if name not in Reads.written:
            try:
                Reads.seen.setdefault(name, super().__getitem__(name))
            except KeyError:
                Reads.seen.setdefault(name, None)
        return super().__getitem__(name)

    def __setitem__(self, name: str, value: str) -> None:
        super().__setitem__(name, value)
        Reads.written.add(name)

    def __delitem__(self, name: str) -> None:
        super().__delitem__(name)
        Reads.written.add(name)


def start_environment() -> dict[str, str]:
    """Return the environment with which this process was started: the interpreter itself changes it (PEP 538)."""
    with open("/proc/self/environ", "rb") as file:
        pairs = (entry.partition(b"=") for entry in file.read().split(b"\0") if entry)
        return {os.fsdecode(name): os.fsdecode(value) for name, _, value in pairs}


@contextlib.contextmanager
def watch_environment() -> Iterator[None]:
    """Note in :class:`Reads` the reads and writes of os.environ."""
    plain = os.environ.__class__
    os.environ.__class__ = Reads
    try:
        yield
    finally:
        os.environ.__class__ = plain


@contextlib.contextmanager
def without_collector() -> Iterator[None]:
    """Keep the garbage collector off: it would go over the imports' objects again and again, for a quarter of their
    time. Thresholds that an import chooses stay."""
    before, off = gc.get_threshold(), (0, *gc.get_threshold()[1:])
    gc.set_threshold(*off)
    try:
        yield
    finally:
        if gc.get_threshold() == off:
            gc.set_threshold(*before)


def first_difference(seen: Mapping[str, str | None], mine: Mapping[str, str], ranks: Mapping[str, str]) -> str | None:
    """Return the first variable that the imports, or perhaps C code, have read and that differs for this rank."""
    names = [name for name in {**mine, **ranks} if READ_IN_C.fullmatch(name)]
    before = {**{name: mine.get(name) for name in names}, **seen}
    return next((name for name in sorted(before) if before[name] != ranks.get(name)), None)


# ---------------------------------------------------------------- files
Stamp = tuple[int, int, int]


def stamp(path: str) -> Stamp | None:
    """Return numbers that change with a file's content."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino


class Files:
    """The script and the files of its modules, as they were when they were read."""

    def __init__(self) -> None:
        self._began = self._loaded = time.time_ns()
        self._stamps: dict[str, Stamp | None] = {}
        self._looked = float("-inf")  # when the last check began
        self._changed: str | None = None  # its result

    def add(self, path: str) -> None:
        """Add a file that is about to be read."""
        self._stamps.setdefault(os.path.abspath(path), stamp(path))

    def add_modules(self) -> None:
        """Add the modules that have been imported: everything has been read."""
        for module in list(sys.modules.values()):
            path = getattr(module, "__file__", None)
            if isinstance(path, str) and os.path.isabs(path):
                self.add(path)
        self._loaded = time.time_ns()

    def first_change(self, asked: float) -> str | None:
        """Return the first file that has changed since it was read, or while it was read. asked: when a rank was
        requested, by the monotonic clock. A check that began later counts for this rank as well: ranks that are
        requested together cost one or two checks, and every edit before a rank's request is seen."""
        if self._looked <= asked:
            self._looked = time.monotonic()
            self._changed = next(self._changes(), None)
        return self._changed

    def _changes(self) -> Iterator[str]:
        for path, before in self._stamps.items():
            if before is not None and (stamp(path) != before or self._began < before[0] <= self._loaded):
                yield path


# ---------------------------------------------------------------- the zygote
class Zygote:
    """Serves requests on `line` for the command `words`, and ignores the signals `deaf`, which ranks do not."""

    def __init__(self, line: socket.socket, words: list[str], deaf: Sequence[signal.Signals]):
        self._line, self._words, self._deaf = line, words, deaf
        self._agent = os.getppid()
        self._mine = start_environment()
        self.first = ""
        """The first entry of sys.path for the command."""
        Reads.written |= {name for name, value in os.environ.items() if self._mine.get(name) != value}
        self._written: dict[str, str | None] = {}
        self._files = Files()
        self._seeds = forkable.Seeds()

    def load(self, preload: list[str], later: list[str]) -> None:
        """Import the user's modules `preload`, the script's leading imports, and the agent's modules `later`, or raise
        Cold."""
        before = set(forkable.descriptors())
        counters.install_later, sys.modules[counters.NAME] = True, counters
        self.first = lead_path(self._words)
        with watch_environment(), without_collector(), forkable.without_driver(), self._seeds.note_choices():
            self._import_all(preload)
            for path, package in self._scripts():
                self._lead(path, package)
            self._import_all(later)
            with contextlib.suppress(Cold):  # errors are left to the ranks, which would import these by themselves
                self._import_all([module for now, module in LATER.items() if now in sys.modules])
        self._files.add_modules()
        self._written = {name: os.environ.get(name) for name in Reads.written}
        if reason := forkable.unsafe() or forkable.open_handles(before | {self._line.fileno()}) or forkable.trial():
            raise Cold(reason)
        gc.freeze()  # a collection in a fork must not write to shared memory; a first one here took 0.2 s

    def _scripts(self) -> Iterator[tuple[str, str | None]]:
        """Yield (path, package) of each file whose leading imports the command's process begins with."""
        if self._words[0] != "-m":
            yield self._words[0], None
            return
        try:
            spec = importlib.util.find_spec(self._words[1])
            if spec is not None and spec.submodule_search_locations is not None:
                spec = importlib.util.find_spec(f"{self._words[1]}.__main__")
        except Exception as error:
            raise Cold(f"module {self._words[1]}: {type(error).__name__}: {error}") from None
        if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
            raise Cold(f"module {self._words[1]} is no Python file")
        yield spec.origin, spec.parent
        if self._words[1] == LAUNCHER and len(self._words) > 2:
            self.first = lead_path(self._words[2:], self.first)
            yield self._words[2], None

    def _lead(self, path: str, package: str | None) -> None:
        """Run the leading imports of one file, in a namespace that is thrown away."""
        self._files.add(path)
        try:
            with open(path, "rb") as file:
                statements = leading_imports(importlib.util.decode_source(file.read()), path)
        except (OSError, SyntaxError, ValueError, RecursionError, MemoryError) as error:
            raise Cold(f"{path}: {error}") from None
        space: dict[str, object] = {"__name__": "__zygote__", "__package__": package, "__file__": path}
        for statement in statements:
            self._import(statement, space, f"line {statement.lineno} of {path}")

    def _import_all(self, names: list[str]) -> None:
        for name in names:
            self._import(ast.parse(f"import {name}").body[0], {}, f"import {name}")

    def _import(self, statement: ast.stmt, space: dict[str, object], where: str) -> None:
        try:
            exec(compile(ast.Module([statement], []), "<zygote>", "exec", dont_inherit=True), space)
        except BaseException as error:  # including SystemExit
            raise Cold(f"{where}: {type(error).__name__}: {error}") from None

    def send_to_agent(self, **message: Any) -> None:
        """Send a message to the agent, if it still lives."""
        with contextlib.suppress(OSError):
            self._line.send(json.dumps(message).encode())

    def serve(self) -> list[str]:
        """Answer requests until the agent closes the line; in each rank, return with its command."""
        while True:
            data, files, _, _ = socket.recv_fds(self._line, ANSWER_BYTES, 5)
            if not data:
                sys.exit(0)
            message = json.loads(data)
            with os.fdopen(files[0], "rb") as file:
                file.seek(0)
                request = json.load(file)
            answer = self._refusal(request["environment"], message.get("asked", time.monotonic()))
            if answer is None:
                pid = self._fork(request["environment"], request.get("cpus", []), files[1:])
                if pid == 0:
                    words: list[str] = request["words"]
                    return words
                answer = {"pid": pid} if pid > 0 else {"cold": "the zygote could not fork it"}
            for descriptor in files[1:]:
                os.close(descriptor)
            self.send_to_agent(number=message["number"], **answer)

    def _refusal(self, environment: Mapping[str, str], asked: float) -> dict[str, object] | None:
        if path := self._files.first_change(asked):
            return {"cold": f"{path} has changed since it was read", "stale": True}
        if name := first_difference(Reads.seen, self._mine, environment):
            return {"cold": f"its imports depend on {name}, which this rank has otherwise"}
        return None

    def _fork(self, environment: Mapping[str, str], cpus: list[int], streams: list[int]) -> int:
        """Fork a grandchild that becomes the agent's child; return its pid, and 0 in it. cpus: see :meth:`_become`."""
        read, write = os.pipe()
        middle = os.fork()
        if middle == 0:
            os.close(read)
            between = os.getpid()
            try:
                rank = os.fork()
            except OSError:
                os._exit(1)
            if rank != 0:
                with contextlib.suppress(OSError):
                    os.setpgid(rank, rank)  # so that signals to the group reach it at once
                os.write(write, str(rank).encode())
                os._exit(0)
            os.close(write)
            self._become(between, environment, cpus, streams)
            return 0
        os.close(write)
        os.waitpid(middle, 0)
        text = os.read(read, 32)
        os.close(read)
        return int(text or -1)

    def _become(self, between: int, environment: Mapping[str, str], cpus: list[int], streams: list[int]) -> None:
        """Become like a new process of the agent; called in the rank. cpus: if not the agent's."""
        with contextlib.suppress(OSError):
            os.setpgid(0, 0)
        adopt(self._agent, between)
        for number, stream in enumerate(streams[:3]):
            os.dup2(stream, number)
            os.close(stream)
        self._line.close()
        counters.install_later = False
        for number in self._deaf:
            if signal.getsignal(number) is signal.SIG_IGN:
                own = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
                signal.signal(number, own)
        if not os.read(streams[3], 1):
            os._exit(128 + signal.SIGKILL)  # the agent has stopped waiting for it
        os.close(streams[3])
        restore(os.environ, environment, self._written)
        if cpus:
            with contextlib.suppress(OSError):  # Slurm allows only the step's own
                os.sched_setaffinity(0, cpus)
        self._seeds.renew()
        if "torch" in sys.modules:
            counters.install()  # otherwise torch does at its import


def restore(mine: MutableMapping[str, str], ranks: Mapping[str, str], written: Mapping[str, str | None]) -> None:
    """Make `mine` the rank's environment, with what the imports wrote to it."""
    for name in set(mine) - set(ranks):
        del mine[name]
    for name, value in ranks.items():
        if mine.get(name) != value:
            mine[name] = value
    for name, written_value in written.items():
        if written_value is None:
            mine.pop(name, None)
        else:
            mine[name] = written_value


def adopt(agent: int, between: int) -> None:
    """Wait until this process is the agent's child, and die with the agent from then on (prctl(2))."""
    deadline = time.monotonic() + ADOPTED_SECONDS
    while os.getppid() == between and time.monotonic() < deadline:
        time.sleep(0.0005)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != agent:  # the agent has died, or is no subreaper
        os._exit(128 + signal.SIGKILL)


# ---------------------------------------------------------------- the rank
def run(words: list[str], first: str) -> None:
    """Run the command as `__main__`, like the interpreter; raises its errors. first: see :class:`Zygote`."""
    main = types.ModuleType("__main__")
    vars(main).update(__builtins__=__builtins__)
    if sys.version_info < (3, 14):
        vars(main).update(__annotations__={})
    sys.modules["__main__"] = main
    sys.orig_argv = [*sys.orig_argv[: sys.orig_argv.index(os.path.abspath(__file__))], *words]
    lead_path(words, first)
    if words[0] == "-m":
        sys.argv = ["-m", *words[2:]]
        runpy._run_module_as_main(words[1])  # type: ignore[attr-defined]  # what `python -m` itself calls
        return
    sys.argv = words
    path = os.path.join(os.getcwd(), words[0])
    loader = importlib.machinery.SourceFileLoader("__main__", path)
    code = compile(loader.get_data(path), path, "exec", dont_inherit=True)
    vars(main).update(__file__=path, __cached__=None, __loader__=loader)
    exec(code, vars(main))


def run_to_end(words: list[str], first: str) -> int:
    """Run the command, and return its exit status like the interpreter's."""
    try:
        run(words, first)
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return (end.code or 0) & 0xFF
        print(end.code, file=sys.stderr)
        return 1
    except BaseException as error:
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
            trace = trace.tb_next  # the interpreter would not show these frames
        sys.excepthook(type(error), error.with_traceback(trace), trace)
        if isinstance(error, KeyboardInterrupt):
            return -signal.SIGINT
        return 1
    return 0


def has_nanobind() -> bool:
    """Whether nanobind has made a function of an imported module: triton's library, from torch 2.15 on."""
    for module in list(sys.modules.values()):
        names = getattr(module, "__dict__", {})
        if isinstance(names.get("__loader__"), importlib.machinery.ExtensionFileLoader) and any(
            type(value).__module__ == "nanobind" for value in names.values()
        ):
            return True
    return False


def exit_process(code: int) -> NoReturn:
    """End like the interpreter: by the signal itself if that was what ended the script."""
    if has_nanobind():
        gc.unfreeze()  # nanobind reports each object that the last collection leaves, which takes a second
    if code >= 0:
        sys.exit(code)
    sys.stdout.flush()
    signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
    sys.exit(128 - code)


def main() -> NoReturn:
    """Run the zygote and, in each fork, the rank."""
    line = socket.socket(fileno=int(sys.argv[1]))
    words = sys.argv[2:]
    zygote = Zygote(line, words, step_signals.ignore_step_signals())  # ranks ignore only what was ignored before
    task = json.loads(line.recv(ANSWER_BYTES))
    sys.argv = ["-m", *words[2:]] if words[0] == "-m" else words
    try:
        if task.get("format") != FORMAT:
            raise Cold("the agent began with another release than the one that is installed now: new steps are warm")
        if os.getppid() != task["agent"]:  # forks could not become its children
            raise Cold("the interpreter is started by a wrapper that stays in front of it")
        zygote.load(task["preload"], task["told"])
    except Cold as reason:
        zygote.send_to_agent(off=" ".join(str(reason).split())[:1000])
        sys.exit(0)
    sys.stdout.flush()
    sys.stderr.flush()
    zygote.send_to_agent(ready=True)
    exit_process(run_to_end(zygote.serve(), zygote.first))


if __name__ == "__main__":
    main()
