"""Processes that are forked from a zygote are what processes of their own would be; where not, it is said."""

from __future__ import annotations

import functools
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from tests.support.processes import is_alive, state_of, wait_for
from tests.support.warm import OfAll, Warm
from unicron_ctl.agent.ranks.zygote_client import TRIES, ZygoteClient
from unicron_detector.processes.supervise import Child, Surroundings, adopt_orphans, reap_orphans

pytestmark = pytest.mark.process


@pytest.fixture
def script(tmp_path):
    """Writes the script; returns its path."""

    def write(text: str, name: str = "script.py") -> Path:
        path = tmp_path / name
        path.write_text(textwrap.dedent(text))
        old = time.time() - 60  # it was there before the zygote began
        os.utime(path, (old, old))
        return path

    return write


@pytest.fixture
def begin():
    """Begins zygotes, which end with the test."""
    begun: list[Warm] = []

    def one(*words: object, **settings) -> Warm:
        begun.append(Warm([str(word) for word in words], **settings))
        return begun[-1]

    yield one
    for warm in begun:
        warm.close()
    reap_orphans([])


def run_warm(warm: Warm, tmp_path: Path, **settings: str) -> tuple[int | None, str, str]:
    """(exit code, standard output, standard error) of a forked process."""
    with (tmp_path / "out").open("w+b") as out:
        coming = warm.request_fork(warm.environment | settings, surroundings=Surroundings(stdout=out.fileno()))
        child = coming.child() if coming is not None else None
        assert child is not None, coming.cold if coming is not None else warm.why
        code = child.reap(60.0)
        text = child.tail()
        child.close()
        out.seek(0)
        return code, out.read().decode(), text


def test_a_fork_runs_on_the_cpus_of_its_own_task(begin, script, tmp_path: Path) -> None:
    warm, cpu = begin(script("import os\nprint(os.sched_getaffinity(0))\n")), min(os.sched_getaffinity(0))
    with (tmp_path / "out").open("w+b") as out:
        around = Surroundings(stdout=out.fileno(), cpus=frozenset({cpu}))
        coming = warm.request_fork(warm.environment, surroundings=around)
        child = coming.child()
        assert child is not None and child.reap(60.0) == 0, coming.cold
        child.close()
        out.seek(0)
        assert out.read().decode() == f"{{{cpu}}}\n"


def run_cold(warm: Warm, *words: object, **settings: str) -> tuple[int, str, str]:
    """The same of a process of its own."""
    command = [sys.executable, "-W", "ignore", *map(str, words)]
    done = subprocess.run(command, env=warm.environment | settings, capture_output=True, text=True, timeout=60)
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    return done.returncode, done.stdout, "\n".join(lines)


def refused(warm: Warm, **settings: str) -> str:
    """Why a process with this environment has to start cold."""
    coming = warm.request_fork(warm.environment | settings)
    if coming is None:
        return warm.why
    assert coming.child() is None
    return coming.cold


# ctypes: newer releases of libffi keep a descriptor of their own open from its import on, as torch does.
FACTS = """
    import ctypes, json, os, random, resource, signal, sys, threading

    def main():
        facts = {
            "argv": sys.argv, "orig": sys.orig_argv, "path": sys.path, "flags": str(sys.flags), "name": __name__,
            "file": __file__, "globals": sorted(globals()), "main": sys.modules["__main__"].__dict__ is globals(),
            "environment": sorted((name, os.environ[name]) for name in os.environ if name != "PWD"),
            "folder": os.getcwd(), "umask": os.umask(0o22),
            "limits": [resource.getrlimit(n) for n in range(16)],
            "signals": {n: str(signal.getsignal(n)) for n in range(1, 32)},
            "mask": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])), "group": os.getpgrp() == os.getpid(),
            "threads": threading.active_count(), "session": os.getsid(0), "tasks": len(os.listdir("/proc/self/task")),
            "descriptors": sorted(os.listdir("/proc/self/fd")), "nice": os.nice(0),
            "input": os.readlink("/proc/self/fd/0"), "spec": __spec__ and __spec__.name, "package": __package__,
            "doc": __doc__, "cached": __cached__, "loader": type(__loader__).__name__,
        }
        print(json.dumps(facts, indent=1, default=str))

    main()
"""


@pytest.mark.parametrize(
    ("as_module", "hangup"), [(False, signal.SIG_DFL), (True, signal.SIG_DFL), (False, signal.SIG_IGN)]
)
def test_a_fork_finds_what_a_process_of_its_own_finds(script, begin, tmp_path, monkeypatch, request, as_module, hangup):
    """Also where SIGHUP is ignored, as under nohup(1)."""
    request.addfinalizer(functools.partial(signal.signal, signal.SIGHUP, signal.signal(signal.SIGHUP, hangup)))
    monkeypatch.chdir(tmp_path)
    script(FACTS, "facts.py")
    words = ["-m", "facts", "one", "two words"] if as_module else ["facts.py", "one", "two words"]
    warm = begin(*words)
    settings = {"OF_THE_RANK": "ä b\n"}
    with (tmp_path / "cold").open("w+b") as out:
        command = ["sh", "-c", f'exec "$@" >{tmp_path}/cold', "sh", sys.executable, "-W", "ignore", *words]
        child = Child(command, warm.environment | settings)
        assert child.reap(60.0) == 0, child.tail()
        child.close()
        cold = out.read().decode()
    code, said, errors = run_warm(warm, tmp_path, **settings)
    assert (code, errors) == (0, "")
    assert said == cold


def test_what_ends_a_steps_ranks_leaves_the_zygote_alone_and_says_nothing(script, begin, tmp_path) -> None:
    """Defect: at Ctrl-C in srun the zygote's own traceback stood among the user's."""
    asks = script("import signal\nprint(signal.getsignal(signal.SIGINT))\n")
    warm = begin(asks)
    with (tmp_path / "out").open("w+b") as out:
        around = Surroundings(stdout=out.fileno())
        assert warm.request_fork(warm.environment, surroundings=around) is not None  # it is ready
    assert warm.zygote.pid is not None
    os.kill(warm.zygote.pid, signal.SIGINT)
    assert run_warm(warm, tmp_path) == run_cold(warm, asks)  # who started the tests may ignore it


def test_a_process_that_was_reaped_gets_no_signal_though_its_number_may_be_anothers(monkeypatch) -> None:
    child = Child([sys.executable, "-c", ""], dict(os.environ))
    assert child.reap(60.0) == 0
    sent: list[int] = []
    monkeypatch.setattr(os, "killpg", lambda group, number: sent.append(group))
    child.signal(signal.SIGKILL)
    child.close()
    assert not sent


ENDS = {
    "nothing": "print('to the end')",
    "status": "import sys; sys.exit(7)",
    "a large status": "raise SystemExit(300)",
    "negative": "raise SystemExit(-1)",
    "text": "raise SystemExit('it cannot be')",
    "none": "raise SystemExit(None)",
    "exception": "def f():\n    raise ValueError('no')\nf()",
    "cause": "try:\n    1 / 0\nexcept ZeroDivisionError as e:\n    raise KeyError('k') from e",
    "syntax": "print('never'\n",
    "at once": "import os; os._exit(3)",
    "signal": "import os, signal; os.kill(os.getpid(), signal.SIGTERM)",
    "abort": "import os; os.abort()",
    "interrupt": "raise KeyboardInterrupt",
    "atexit": "import atexit, sys; atexit.register(print, 'last'); file = open('left-open', 'w'); file.write('kept'); "
    "sys.stdout.write('no newline')",
    "thread": "import threading, time\ndef f():\n    time.sleep(0.3)\n    print('a thread')\n"
    "threading.Thread(target=f).start()",
    "hook": "import sys\nsys.excepthook = lambda *a: print('hook', a[0].__name__, a[1])\nraise OSError('x')",
}


@pytest.mark.parametrize("name", ENDS)
def test_a_fork_ends_as_a_process_of_its_own_does(script, begin, tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    path = script(ENDS[name])
    warm = begin(path) if name != "syntax" else begin(script("import os\n"))
    if name == "syntax":  # its imports cannot even be read: it is another that the zygote was made for
        warm.zygote._words = [str(path)]
    found = run_warm(warm, tmp_path)
    left = (tmp_path / "left-open").read_text() if name == "atexit" else ""
    assert found == run_cold(warm, path)
    assert left == ("kept" if name == "atexit" else "")


UNSAFE = {
    "a thread": (
        "import threading, time\nthreading.Thread(target=time.sleep, args=(99,), daemon=True).start()",
        "threads",
    ),
    "a socket": ("import socket\nopen_one = socket.socket()", "a socket"),
    "a device": ("opened = open('/dev/ptmx', 'rb')", "/dev/ptmx"),
    "a pipe": ("import os\npipe = os.pipe()", "a pipe"),
    "a process": ("import subprocess\nprocess = subprocess.Popen(['sleep', '9'])", "child process"),
    "an end": ("import sys\nsys.exit(4)", "SystemExit: 4"),
    "an error": ("import nothing_of_this_name", "No module named 'nothing_of_this_name'"),
}


@pytest.mark.parametrize("name", UNSAFE)
def test_imports_whose_doings_a_fork_would_share_keep_the_ranks_cold(script, begin, name):
    code, says = UNSAFE[name]
    script(code, "doing.py")
    warm = begin(script("import os\nimport doing\n"))
    assert says in refused(warm) and warm.zygote.pid is None
    assert says in refused(warm), "and so it stays"


def test_what_imports_read_of_the_environment_must_be_the_ranks(script, begin, tmp_path):
    script(
        "import os\nRANK, HOME = os.environ.get('RANK'), os.environ['HOME']\nos.environ['SET'] = 'by it'\n", "reads.py"
    )
    warm = begin(
        script("import os\nimport reads\nprint(reads.RANK, os.environ['SET'], os.environ['OTHER'])\n"), RANK="0"
    )
    assert run_warm(warm, tmp_path, OTHER="mine") == (0, "0 by it mine\n", "")
    assert "RANK" in refused(warm, RANK="1") and "OMP_NUM_THREADS" in refused(warm, OMP_NUM_THREADS="2")
    assert run_warm(warm, tmp_path, OTHER="again")[0] == 0, "others are not kept from it"


@pytest.mark.parametrize("edited", ["script.py", "module.py"])
def test_code_that_was_edited_is_run_as_it_is_now(script, begin, tmp_path, edited):
    """By the rank itself, started cold, and by the next from a new zygote."""
    script("WORD = 'old'\n", "module.py")
    path = script("import module\nprint(module.WORD, 'old')\n")
    warm = begin(path)
    assert run_warm(warm, tmp_path) == (0, "old old\n", "")
    before = warm.zygote.pid
    text = (tmp_path / edited).read_text()
    (tmp_path / edited).write_text(text.replace("'old'", "'new!'"))
    assert refused(warm) == f"{tmp_path / edited} has changed since it was read"
    assert warm.zygote.pid != before and not is_alive(before)
    assert run_warm(warm, tmp_path) == (0, "new! old\n" if edited == "module.py" else "old new!\n", "")


def test_only_imports_at_the_top_are_made_before_and_the_script_itself_is_not(script, begin, tmp_path):
    for name in ("early", "named", "wanted", "late"):
        script(f"print('{name}')\n", f"{name}.py")
    path = script(
        "'''A script.'''\nimport early\nSIZE = 3\nUNICRON_PRELOAD = ('named',)\nprint('runs')\nimport late, early\n"
    )
    out = tmp_path / "of the zygote"
    command = f"import sys; sys.path[:0] = {sys.path!r}\nfrom tests.support.warm import Warm\n"
    command += f"warm = Warm([{str(path)!r}], preload=['wanted']); warm.serve(lambda: warm.zygote.ready); warm.close()"
    with out.open("wb") as file:
        subprocess.run([sys.executable, "-c", command], stdout=file, check=True, timeout=60)
    assert out.read_text().split() == ["wanted", "early", "named"]
    assert run_warm(begin(path), tmp_path) == (0, "runs\nlate\n", "")


def test_what_torch_imports_with_the_first_optimizer_is_there_before(script, begin, tmp_path):
    path = script("import torch, sys\nprint('torch._dynamo' in sys.modules)\n")
    warm = begin(path)
    assert run_cold(warm, path)[1] == "False\n" and run_warm(warm, tmp_path) == (0, "True\n", "")


def test_what_imports_do_to_the_search_path_stays_as_they_did_it(script, begin, tmp_path):
    script("import sys\nsys.path.insert(0, '/of the import')\nsys.path.append('/last')\n", "changes.py")
    path = script("import changes, sys\nprint(sys.path)\n")
    warm = begin(path)
    assert run_warm(warm, tmp_path) == run_cold(warm, path)


def test_what_a_site_relies_on_is_there(script, begin, tmp_path):
    script("import builtins\nbuiltins.of_the_site = 'here'\n", "sitecustomize.py")
    library = next(Path("/").glob("lib*/**/libanl.so.1"))
    path = script("print(of_the_site, any('libanl' in line for line in open('/proc/self/maps')))\n")
    warm = begin(path, PYTHONPATH=f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}", LD_PRELOAD=str(library))
    assert run_warm(warm, tmp_path) == (0, "here True\n", "")


@pytest.mark.wide
def test_random_numbers_are_each_processes_own_unless_an_import_chose_them(script, begin, tmp_path):
    draws = "import random, numpy, torch\nprint(random.random(), numpy.random.rand(), torch.rand(1).item())\n"
    warm = begin(script(draws))
    one, two = (run_warm(warm, tmp_path)[1].split() for _ in range(2))
    assert one[0] != two[0] and one[1] != two[1]
    assert one[2] != two[2]
    script("import random, numpy, torch\nrandom.seed(1)\nnumpy.random.seed(1)\ntorch.manual_seed(1)\n", "seeds.py")
    chosen = begin(script(f"import seeds\n{draws}", "chosen.py"))
    said = [run_warm(chosen, tmp_path)[1], run_warm(chosen, tmp_path)[1], run_cold(chosen, tmp_path / "chosen.py")[1]]
    assert len(set(said)) == 1


# ---------------------------------------------------------------- a zygote that fails
SLEEPS = "import os, time\nprint('up', flush=True)\ntime.sleep(600)\n"


def test_a_zygote_that_is_killed_costs_its_lead_only(script, begin, tmp_path):
    warm = begin(script(SLEEPS))
    zygote: ZygoteClient = warm.zygote
    warm.serve(lambda: zygote.ready)
    dead = zygote.pid
    os.kill(dead, signal.SIGKILL)
    coming = zygote.request_fork(warm.environment)  # it is not known yet
    assert coming is not None
    warm.serve(lambda: coming.settled)
    assert coming.child() is None and "ended with -9" in coming.cold
    assert zygote.request_fork(warm.environment) is None, "it rests first"
    warm.serve(lambda: zygote.ready)
    assert zygote.pid != dead


def test_a_zygote_that_dies_in_the_middle_of_a_fork(script, begin, tmp_path):
    warm = begin(script(SLEEPS))
    zygote = warm.zygote
    warm.serve(lambda: zygote.ready)
    os.kill(zygote.pid, signal.SIGSTOP)
    wait_for(lambda: state_of(zygote.pid) == "T", "it has stopped")
    coming = zygote.request_fork(warm.environment)
    os.kill(zygote.pid, signal.SIGKILL)
    warm.serve(lambda: coming.settled)
    assert coming.child() is None and "ended with -9" in coming.cold


@pytest.mark.wide
def test_a_zygote_that_hangs_is_not_waited_for_and_is_replaced(script, begin):
    warm = begin(script(SLEEPS))
    zygote = warm.zygote
    warm.serve(lambda: zygote.ready)
    hangs = zygote.pid
    os.kill(hangs, signal.SIGSTOP)
    coming = zygote.request_fork(warm.environment)
    warm.serve(lambda: coming.settled)
    assert coming.child() is None and "not answered within" in coming.cold
    assert zygote.request_fork(warm.environment) is None and zygote.why == "the zygote does not answer"
    warm.serve(lambda: zygote.pid not in (hangs, None) and zygote.ready)


def test_a_fork_that_is_not_wanted_any_more_never_begins(script, begin, tmp_path):
    note = tmp_path / "begun"
    warm = begin(script(f"open({str(note)!r}, 'w')\n"))
    coming = warm.request_fork(warm.environment)
    pid = coming.pid
    assert is_alive(pid)
    coming.drop()
    wait_for(lambda: not is_alive(pid), "its end")
    os.waitpid(pid, 0)
    assert not note.exists()


def test_a_zygote_that_dies_again_and_again_is_given_up(script, begin, monkeypatch):
    monkeypatch.setattr("unicron_ctl.agent.ranks.zygote_client.REST_SECONDS", 0.01)
    script("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)\n", "dies.py")
    warm = begin(script("import dies\n"))
    warm.serve(lambda: warm.zygote._tries == TRIES)
    assert warm.zygote._again is None and "ended with -9" in refused(warm)


def test_fifty_processes_in_a_row_leave_nothing_behind(script, begin, tmp_path):
    warm = begin(script("import json\nprint(len(json.__name__))\n"))

    def held() -> tuple[int, int, int]:
        pages = int(Path(f"/proc/{warm.zygote.pid}/statm").read_text().split()[1])
        return len(os.listdir("/proc/self/fd")), len(os.listdir(f"/proc/{warm.zygote.pid}/fd")), pages

    for _ in range(5):
        assert run_warm(warm, tmp_path)[0] == 0
    before, pid = held(), warm.zygote.pid
    for _ in range(50):
        assert run_warm(warm, tmp_path) == (0, "4\n", "")
    after = held()
    assert warm.zygote.pid == pid and after[:2] == before[:2]
    assert after[2] - before[2] < 64, "pages"
    assert os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None, "nobody waits to be reaped"


def test_imports_that_take_too_long_are_not_waited_for(script, begin, tmp_path, monkeypatch):
    monkeypatch.setattr("unicron_ctl.agent.ranks.zygote_client.LOAD_SECONDS", 0.3)
    gate = tmp_path / "gate"
    script(f"import os, time\nwhile not os.path.exists({str(gate)!r}):\n    time.sleep(0.01)\n", "slow.py")
    warm = begin(script("import slow\nprint('here')\n"))
    assert "not imported everything within 0.3 s" in refused(warm)
    assert warm.zygote.timeout(time.monotonic()) > 60, "nothing is due by time until it is ready"
    gate.touch()
    warm.serve(lambda: warm.zygote.ready)
    assert run_warm(warm, tmp_path) == (0, "here\n", "")


def test_the_tests_own_zygote_is_waited_for_however_busy_the_machine_is(script, tmp_path, monkeypatch):
    """Defect: at a load of 33 its imports took 85 s of the 90 that any answer had, and the first test failed."""
    monkeypatch.setattr("unicron_ctl.agent.ranks.zygote_client.LOAD_SECONDS", 0.3)
    script("import time\ntime.sleep(1.0)\n", "slow.py")
    path = script("import slow\nprint('here')\n")
    warm = OfAll([str(path)])
    try:
        assert run_warm(warm, tmp_path, TINY_SCRIPT=str(path)) == (0, "here\n", "")
    finally:
        warm.close()
        reap_orphans([])


def test_eight_that_are_asked_for_at_once_are_all_warm_however_slow_the_look_at_the_files(
    script, begin, tmp_path, monkeypatch
):
    """Defect: each had a look of its own, and all of them together the time of one."""
    monkeypatch.setattr(Warm, "patience", (8.0, 60.0))
    looks = tmp_path / "looks"
    module = f"""
        import os, time

        plain, mine = os.stat, __file__

        def slow(path, **settings):
            if path == mine:
                with open({str(looks)!r}, "a") as file:
                    file.write("x")
                time.sleep(1.5)
            return plain(path, **settings)

        os.stat = slow
    """
    script(module, "slow.py")
    warm = begin(script("import slow\nprint('here')\n"))
    adopt_orphans()
    try:
        comings = [warm.zygote.request_fork(warm.environment) for _ in range(8)]
        warm.serve(lambda: all(coming.settled for coming in comings))
    finally:
        adopt_orphans(False)
    assert [coming.cold for coming in comings] == [""] * 8
    assert looks.read_text() == "xx", "when all was imported, and for the eight"
    children = [coming.child() for coming in comings]
    assert [child.reap(60.0) for child in children] == [0] * 8
    for child in children:
        child.close()


def test_behind_a_wrapper_that_stays_in_front_ranks_start_cold(begin, script, tmp_path):
    wrapper = tmp_path / "python"
    wrapper.write_text(f'#!/bin/sh\n"{sys.executable}" "$@"\n')
    wrapper.chmod(0o755)
    warm = begin(script("import json\n"), python=str(wrapper))
    warm.serve(lambda: bool(warm.why))
    assert "a wrapper that stays in front of it" in warm.why
