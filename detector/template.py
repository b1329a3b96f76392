"""The template: a process that has imported what a job's script needs, and forks a rank of itself on demand
(docs/design/warm-processes.md).

    python [FLAGS] template.py DESCRIPTOR SCRIPT|-m MODULE [ARGUMENTS]

It is run by its path with the job's own interpreter and environment, so at its top it has the standard library only.
Over the SOCK_SEQPACKET socket DESCRIPTOR come one task (:class:`Task`), then requests; every message is a JSON map. A
request has four descriptors: a file with the rank's environment and arguments, its standard output, its standard error,
and the pipe from which the rank reads whether it may begin. It is answered with the pid, or with the reason why this
rank has to start cold. The rank is forked twice: it is then a child of the agent, which is a subreaper.
"""

from __future__ import annotations

import sys

if __name__ == "__main__" and not sys.flags.safe_path:
    del sys.path[0]  # this file's folder, whose modules hide others

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
import threading
import time
import types
from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any, NoReturn

PR_SET_PDEATHSIG = 1
ANSWER_BYTES = 65536
ADOPTED_SECONDS = 2.0  # for the agent to become the rank's parent
LARGE_SEED = 1 << 32  # torch draws 64 bits; what people choose is smaller
TRIAL_SECONDS = 10.0  # for a forked process to compute something
# Read by C code, or by the interpreter before the first import, so nothing shows that they were read.
READ_IN_C = re.compile(r"(PYTHON|LD_|LC_|OMP_|MKL_|KMP_|GOMP_|OPENBLAS_|MALLOC_|GLIBC_|ASAN_)\w+|LANG|TZ|PATH")
HARMLESS_DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom", "/dev/shm/", "/dev/pts/")
FOR_RANKS = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)  # Slurm sends them to every process of a step
LAUNCHER = "transition.megatron_lm"  # runs the script that is its first argument


class Cold(Exception):
    """Ranks have to start cold; the text says why."""


# ---------------------------------------------------------------- what is imported
def leading_imports(source: str, name: str) -> list[ast.stmt]:
    """The import statements at the top of a script, in their order: up to the first statement that is neither one, nor
    a docstring, nor the assignment of a constant. The constant UNICRON_PRELOAD, a tuple of names, stands for the import
    of these modules. Raises SyntaxError."""
    found: list[ast.stmt] = []
    for statement in ast.parse(source, name).body:
        match statement:
            case ast.ImportFrom(module="__future__"):
                pass
            case ast.Import() | ast.ImportFrom():
                found.append(statement)
            case ast.Expr(value=ast.Constant()):
                pass
            case ast.Assign(targets=[ast.Name(id="UNICRON_PRELOAD")], value=ast.Tuple() as value) if constant(value):
                names = ast.parse(f"import {', '.join(map(str, ast.literal_eval(value)))}", name).body
                found += [ast.increment_lineno(each, statement.lineno - 1) for each in names]
            case ast.Assign(value=value) | ast.AnnAssign(value=ast.expr() as value) if constant(value):
                pass
            case _:
                break
    return found


def constant(value: ast.expr) -> bool:
    """A literal, which depends on nothing."""
    try:
        ast.literal_eval(value)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return False
    return True


def script_folder(script: str) -> str:
    """What the interpreter puts first into sys.path for a script."""
    return os.path.dirname(os.path.realpath(script))


def first_path(words: list[str]) -> str:
    """sys.path[0] for a command `SCRIPT ...` or `-m MODULE ...`."""
    return os.getcwd() if words[0] == "-m" else script_folder(words[0])


class Reads(os._Environ):
    """os.environ while the imports run: `seen` is what they read of it, None for what was not set; `written` what they
    wrote. (Copies and loops show as reads of what there is.)"""

    seen: dict[str, str | None] = {}
    written: set[str] = set()

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


def given() -> dict[str, str]:
    """The environment with which this process was started: the interpreter itself changes it (PEP 538)."""
    with open("/proc/self/environ", "rb") as file:
        pairs = (entry.partition(b"=") for entry in file.read().split(b"\0") if entry)
        return {os.fsdecode(name): os.fsdecode(value) for name, _, value in pairs}


@contextlib.contextmanager
def watched() -> Iterator[None]:
    """Notes in :class:`Reads` what is read of os.environ and written to it."""
    plain = os.environ.__class__
    os.environ.__class__ = Reads
    try:
        yield
    finally:
        os.environ.__class__ = plain


def different(seen: Mapping[str, str | None], mine: Mapping[str, str], ranks: Mapping[str, str]) -> str | None:
    """The first variable that the imports read, or C code may have, and that this rank has otherwise."""
    names = [name for name in {**mine, **ranks} if READ_IN_C.fullmatch(name)]
    before = {**{name: mine.get(name) for name in names}, **seen}
    return next((name for name in sorted(before) if before[name] != ranks.get(name)), None)


# ---------------------------------------------------------------- what would not survive a fork
def unsafe() -> str | None:
    """Why a fork of this process is not as good as a new one."""
    if (threads := threading.active_count()) > 1:
        return f"its imports start threads ({', '.join(t.name for t in threading.enumerate()[1:])}; {threads - 1})"
    native = len(os.listdir("/proc/self/task")) - 1 - blas_threads()
    if native > 0:
        return f"its imports start {native} native thread{'s' if native > 1 else ''}"
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return "its imports open CUDA"
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return None
    return "its imports leave a child process behind"


def blas_threads() -> int:
    """OpenBLAS's own, which it ends before a fork and starts again when they are needed (pthread_atfork(3))."""
    with open("/proc/self/maps") as maps:
        libraries = {line.split()[-1] for line in maps if "openblas" in line and line.split()[-1].startswith("/")}
    count = 0
    for path in libraries:
        library = ctypes.CDLL(path)
        names = ("scipy_openblas_get_num_threads64_", "scipy_openblas_get_num_threads", "openblas_get_num_threads")
        asked = next((getattr(library, name) for name in (*names, names[2] + "64_") if hasattr(library, name)), None)
        count += max(0, asked() - 1) if asked is not None else 0
    return count


def descriptors() -> dict[int, str]:
    """Those that are open, and what they are of."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # that of the folder itself
            found[int(name)] = os.readlink(f"/proc/self/fd/{name}")
    return found


def opened(known: set[int]) -> str | None:
    """What the imports have opened and processes must not share: devices, sockets, pipes, polls."""
    for number, target in sorted(descriptors().items()):
        if number in known:
            continue
        if target.startswith(("socket:", "pipe:", "anon_inode:")):
            return f"its imports open a {target.partition(':')[0]}"
        if target.startswith("/dev/") and not target.startswith(HARMLESS_DEVICES):
            return f"its imports open {target}"
    return None


def trial() -> str | None:
    """Whether a forked process can compute; what it says otherwise."""
    pid = os.fork()
    if pid == 0:
        signal.setitimer(signal.ITIMER_REAL, TRIAL_SECONDS)  # SIGALRM ends it
        sound = len(os.listdir("/proc/self/task")) == 1
        try:
            for name in ("numpy", "torch"):
                if sound and name in sys.modules:
                    ones = sys.modules[name].ones((256, 256))
                    sound = float((ones @ ones).sum()) == 256.0**3
        except BaseException:
            sound = False
        os._exit(int(not sound))
    _, status = os.waitpid(pid, 0)
    code = os.waitstatus_to_exitcode(status)
    return f"a trial fork of it ended with {code}" if code else None


# ---------------------------------------------------------------- files
Stamp = tuple[int, int, int]


def stamp(path: str) -> Stamp | None:
    """What changes with a file's content."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


class Files:
    """The script and the files of the modules that it needs, as they were when they were read."""

    def __init__(self, script: str | None) -> None:
        self._began = self._loaded = time.time_ns()
        self._stamps = {script: stamp(script)} if script else {}

    def loaded(self) -> None:
        """All has been read: the modules that there are now."""
        for module in list(sys.modules.values()):
            path = getattr(module, "__file__", None)
            if isinstance(path, str) and os.path.isabs(path):
                self._stamps.setdefault(path, stamp(path))
        self._loaded = time.time_ns()

    def changed(self) -> str | None:
        """The first that is another by now, or was written while it was read."""
        for path, known in self._stamps.items():
            if known is not None and (stamp(path) != known or self._began < known[0] <= self._loaded):
                return path
        return None


# ---------------------------------------------------------------- the template
class Template:
    """What serves requests: `line` to the agent, whose pid is `agent`, for the command `words`."""

    def __init__(self, line: socket.socket, words: list[str]):
        self._line, self._words = line, words
        self._agent = os.getppid()
        self._mine = given()
        Reads.written |= {name for name, value in os.environ.items() if self._mine.get(name) != value}
        self._written: dict[str, str | None] = {}
        self._files = Files(None if words[0] == "-m" else os.path.abspath(words[0]))

    def load(self, preload: list[str], told: list[str]) -> None:
        """Import the leading imports of the command's script, then the modules `preload`, which the user has named,
        and `told`, which the agent has. Raises Cold."""
        before = set(descriptors())
        if not sys.flags.safe_path:
            sys.path.insert(0, first_path(self._words))
        with watched():
            for name in preload:
                self._import(name)
            for path, package in self._scripts():
                self._lead(path, package)
            for name in told:
                self._import(name)
        if not sys.flags.safe_path:
            del sys.path[0]
        self._files.loaded()
        self._written = {name: os.environ.get(name) for name in Reads.written}
        if reason := unsafe() or opened(before | {self._line.fileno()}) or trial():
            raise Cold(reason)
        gc.collect()
        gc.freeze()  # a collection in a fork must not write to all that it shares

    def _scripts(self) -> Iterator[tuple[str, str | None]]:
        """(path, package) of each file whose leading imports the command's process begins with."""
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
            if not sys.flags.safe_path:
                sys.path[0] = script_folder(self._words[2])
            yield self._words[2], None

    def _lead(self, path: str, package: str | None) -> None:
        """The leading imports of one file, in a namespace that is thrown away."""
        try:
            with open(path, "rb") as file:
                statements = leading_imports(importlib.util.decode_source(file.read()), path)
        except (OSError, SyntaxError, ValueError) as error:
            raise Cold(f"{path}: {error}") from None
        space = {"__name__": "__template__", "__package__": package, "__file__": path}
        for statement in statements:
            code = compile(ast.Module([statement], []), path, "exec", dont_inherit=True)
            try:
                exec(code, space)
            except BaseException as error:  # SystemExit, too
                raise Cold(f"line {statement.lineno} of {path}: {type(error).__name__}: {error}") from None

    def _import(self, name: str) -> None:
        try:
            importlib.import_module(name)
        except BaseException as error:
            raise Cold(f"import {name}: {type(error).__name__}: {error}") from None

    def serve(self) -> list[str]:
        """Answer requests until the agent's end of the line closes; returns in each rank, with its command."""
        while True:
            data, files, _, _ = socket.recv_fds(self._line, ANSWER_BYTES, 4)
            if not data:
                sys.exit(0)
            number = json.loads(data)["number"]
            with os.fdopen(files[0], "rb") as file:
                file.seek(0)
                request = json.load(file)
            answer = self._refusal(request["environment"])
            if answer is None:
                pid = self._fork(request["environment"], files[1:])
                if pid == 0:
                    return request["words"]
                answer = {"pid": pid}
            for descriptor in files[1:]:
                os.close(descriptor)
            tell(self._line, {"number": number, **answer})

    def _refusal(self, environment: Mapping[str, str]) -> dict[str, Any] | None:
        if path := self._files.changed():
            return {"cold": f"{path} has changed since it was read", "stale": True}
        if name := different(Reads.seen, self._mine, environment):
            return {"cold": f"its imports depend on {name}, which this rank has otherwise"}
        return None

    def _fork(self, environment: Mapping[str, str], streams: list[int]) -> int:
        """A grandchild that becomes the agent's child; returns its pid, and 0 in it."""
        read, write = os.pipe()
        middle = os.fork()
        if middle == 0:
            os.close(read)
            between = os.getpid()
            rank = os.fork()
            if rank != 0:
                with contextlib.suppress(OSError):
                    os.setpgid(rank, rank)  # a signal to the group finds it from the first moment
                os.write(write, str(rank).encode())
                os._exit(0)
            os.close(write)
            self._become(between, environment, streams)
            return 0
        os.close(write)
        os.waitpid(middle, 0)
        text = os.read(read, 32)
        os.close(read)
        return int(text)

    def _become(self, between: int, environment: Mapping[str, str], streams: list[int]) -> None:
        """In the rank: what a new process of the agent's would be."""
        with contextlib.suppress(OSError):
            os.setpgid(0, 0)
        adopt(self._agent, between)
        for number, stream in enumerate(streams[:2], 1):
            os.dup2(stream, number)
            os.close(stream)
        self._line.close()
        for number in FOR_RANKS:
            if signal.getsignal(number) is signal.SIG_IGN:
                signal.signal(number, signal.SIG_DFL)
        wait_for_leave(streams[2])
        restore(os.environ, environment, self._written)
        reseed()


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
    """Wait until this process is the agent's child, and die with it from then on (prctl(2))."""
    deadline = time.monotonic() + ADOPTED_SECONDS
    while os.getppid() == between and time.monotonic() < deadline:
        time.sleep(0.0005)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != agent:  # it has died, or is no subreaper
        os._exit(128 + signal.SIGKILL)


def wait_for_leave(descriptor: int) -> None:
    """The agent has this process, or has given up waiting for it: then it ends."""
    go = os.read(descriptor, 1)
    os.close(descriptor)
    if not go:
        os._exit(128 + signal.SIGKILL)


def reseed() -> None:
    """What a new process draws from the system, unless an import has chosen a seed. (Python's own generator does so
    after each fork.)"""
    numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
    if numpy is not None and "numpy.random" in sys.modules:
        if getattr(numpy.random.mtrand._rand._bit_generator, "_seed_seq", None) is not None:
            numpy.random.seed()
    if torch is not None and torch.default_generator.initial_seed() >= LARGE_SEED:
        torch.default_generator.seed()


# ---------------------------------------------------------------- the rank
def run(words: list[str]) -> None:
    """The command as `__main__`, as the interpreter itself would run it. Raises what it raises."""
    main = types.ModuleType("__main__")
    vars(main).update(__builtins__=__builtins__, __annotations__={})
    sys.modules["__main__"] = main
    sys.orig_argv = [*sys.orig_argv[: sys.orig_argv.index(os.path.abspath(__file__))], *words]
    if not sys.flags.safe_path:
        sys.path.insert(0, first_path(words))
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


def end_of(words: list[str]) -> int:
    """Run the command; its exit status, as the interpreter gives it."""
    try:
        run(words)
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return (end.code or 0) & 0xFF
        print(end.code, file=sys.stderr)
        return 1
    except BaseException as error:
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
            trace = trace.tb_next  # what the interpreter would not show
        sys.excepthook(type(error), error.with_traceback(trace), trace)
        if isinstance(error, KeyboardInterrupt):
            return -signal.SIGINT
        return 1
    return 0


def leave(code: int) -> NoReturn:
    """End as the interpreter does: by the signal itself where that was what ended the script."""
    if code >= 0:
        sys.exit(code)
    sys.stdout.flush()
    signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
    sys.exit(128 - code)


def tell(line: socket.socket, message: dict[str, Any]) -> None:
    """To the agent, which may be gone."""
    with contextlib.suppress(OSError):
        line.send(json.dumps(message).encode()[:ANSWER_BYTES])


def main() -> NoReturn:
    """The template, and in each fork the rank."""
    line = socket.socket(fileno=int(sys.argv[1]))
    words = sys.argv[2:]
    for number in FOR_RANKS:
        signal.signal(number, signal.SIG_IGN)
    template = Template(line, words)
    task = json.loads(line.recv(ANSWER_BYTES))
    sys.argv = ["-m", *words[2:]] if words[0] == "-m" else words
    try:
        template.load(task["preload"], task["told"])
    except Cold as reason:
        tell(line, {"off": " ".join(str(reason).split())[:1000]})
        sys.exit(0)
    sys.stdout.flush()
    sys.stderr.flush()
    tell(line, {"ready": True})
    leave(end_of(template.serve()))


if __name__ == "__main__":
    main()
