"""Prolog and epilog: called directly for their decisions, and once by a real slurmd."""

from __future__ import annotations

import fcntl
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.processes import wait_for
from unicron_ctl.agent.connections.rank_socket import socket_folder
from unicron_ctl.lab.cluster.local_cluster import LocalCluster

HOOKS = Path(__file__).resolve().parents[2] / "slurm_plugin"
PROLOG, EPILOG = (HOOKS / f"{name}.d" / "50-unicron" for name in ("prolog", "epilog"))
LIMIT = 10.0  # seconds, whatever else the machine does: a hook gives up what hangs


class Hook:
    """One of the two scripts with a configuration file, called as slurmd does: as good as without environment."""

    def __init__(self, path: Path, folder: Path) -> None:
        self.path, self.folder, self.log = path, folder, folder / "log"
        self.conf = folder / "hook.conf"
        self.settings = {"UNICRON_LOG": str(self.log)}
        self.variable = "UNICRON_PROLOG_CONF" if path == PROLOG else "UNICRON_EPILOG_CONF"

    def __call__(self, limit: float = LIMIT, **environment: str) -> int:
        self.conf.write_text("".join(f"{key}={value}\n" for key, value in self.settings.items()))
        self.log.unlink(missing_ok=True)
        began = time.monotonic()
        done = subprocess.run(
            [self.path],
            env={self.variable: str(self.conf)} | environment,
            capture_output=True,
            text=True,
            timeout=30,
            stdin=subprocess.DEVNULL,
        )
        assert time.monotonic() - began < limit
        assert done.stdout == "" and done.stderr == ""
        return done.returncode

    def said(self) -> str:
        return self.log.read_text() if self.log.exists() else ""


@pytest.fixture
def prolog(tmp_path: Path) -> Hook:
    hook = Hook(PROLOG, tmp_path)
    for index in (0, 1):
        (tmp_path / f"gpu{index}").touch()
    hook.settings |= {"UNICRON_SHM_DIR": str(tmp_path), "UNICRON_GPU_DEVICE": f"{tmp_path}/gpu%s"}
    return hook


JOB = {"SLURM_JOB_ID": "815", "SLURMD_NODENAME": "n1"}


def test_prolog_passes_a_good_node(prolog: Hook) -> None:
    assert prolog(**JOB, SLURM_JOB_GPUS="0,1") == 0 and prolog.said() == ""
    assert [path.name for path in prolog.folder.iterdir() if "probe" in path.name] == []
    assert prolog(**JOB) == 0 and prolog() == 0  # no GPUs; nothing known at all


def test_prolog_refuses_a_node_without_its_gpu_when_told_to(prolog: Hook) -> None:
    assert prolog(**JOB, SLURM_JOB_GPUS="1,2") == 0 and "has no device file" in prolog.said()
    prolog.settings["UNICRON_CHECK_GPU"] = "on"
    assert prolog(**JOB, SLURM_JOB_GPUS="1,2") == 1
    assert "job 815 node n1: a GPU that Slurm allotted (1,2) has no device file" in prolog.said()
    prolog.settings["UNICRON_CHECK_GPU"] = "off"
    assert prolog(**JOB, SLURM_JOB_GPUS="1,2") == 0 and prolog.said() == ""


@pytest.mark.parametrize("setting", [{"UNICRON_SHM_FREE_MB": str(10**9)}, {"UNICRON_SHM_DIR": "/nonexistent"}])
def test_prolog_only_warns_about_shared_memory_unless_told_otherwise(prolog: Hook, setting: dict[str, str]) -> None:
    prolog.settings |= setting
    assert prolog(**JOB) == 0 and "is not there, cannot be written, or is smaller" in prolog.said()
    prolog.settings["UNICRON_CHECK_SHM"] = "on"
    assert prolog(**JOB) == 1
    prolog.settings["UNICRON_CHECK_SHM"] = "off"
    assert prolog(**JOB) == 0 and prolog.said() == ""


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ({"UNICRON_CHECK_GPU": "maybe"}, "couldn't use UNICRON_CHECK_GPU=maybe"),
        ({"UNICRON_CHECK_GPU": "on", "UNICRON_GPU_DEVICE": "/dev/gpu"}, "check gpu can't tell"),
        ({"UNICRON_CHECK_SHM": "on", "UNICRON_SHM_FREE_MB": "much"}, "check shm can't tell"),
        ({"this is no": "setting ' $( ` \""}, ""),
    ],
)
def test_prolog_never_fails_for_a_mistake_in_its_configuration(prolog: Hook, setting: dict, words: str) -> None:
    prolog.settings |= setting
    assert prolog(**JOB, SLURM_JOB_GPUS="0") == 0 and words in prolog.said()
    assert (prolog.said() == "") == (words == "")


def test_prolog_removes_what_other_users_jobs_have_left_and_nobody_holds(prolog: Hook) -> None:
    """Whose it is the folder's owner says. A requeued element finds its own, whatever else is done."""
    me = os.getuid()
    names = (f"unicron.77.a1.n1.{me}", f"unicron.78.a1.n1.{me}", f"unicron.77.a1.n11.{me}", "unicron-815-0")
    for name in names:
        (prolog.folder / name).mkdir()
        (prolog.folder / name / "state-0-0.image").touch()
    left = lambda: {path.name for path in prolog.folder.glob("unicron*")}  # noqa: E731
    prolog.settings["UNICRON_SHM_STRANGERS"] = "100"
    assert prolog(**JOB, SLURM_JOB_UID=str(os.getuid())) == 0 and left() == set(names)
    assert prolog(**JOB) == 0 and left() == set(names), "it is not told whose job it is"
    stranger = JOB | {"SLURM_JOB_UID": str(os.getuid() + 1)}
    prolog.settings["UNICRON_SHM_STRANGERS"] = "0"
    assert prolog(**stranger) == 0 and left() == set(names) and not prolog.said()
    prolog.settings["UNICRON_SHM_STRANGERS"] = "100"
    held = os.open(prolog.folder / names[1], os.O_RDONLY)
    try:
        fcntl.flock(held, fcntl.LOCK_SH)
        assert prolog(**stranger) == 0 and left() == set(names[1:])
    finally:
        os.close(held)
    assert f"{names[0]} removed: another user's job has the node" in prolog.said()


@pytest.fixture
def small_memory(prolog: Hook) -> Iterator[Callable[[str, int, int], Path]]:
    """Shared memory of 20 MB; makes a file or a folder's file there of a user, of so many MB."""
    if os.getuid() != 0:
        pytest.skip("only root mounts")
    place = prolog.folder / "shm"
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=20m,mode=1777", "tmpfs", place], check=True)

    def make(name: str, owner: int, size: int) -> Path:
        path = place / name
        if name.startswith("unicron."):
            path.mkdir(mode=0o700)
            os.chown(path, owner, owner)
            path /= "state-0-0.image"
        path.write_bytes(bytes(size << 20))
        os.chown(path, owner, owner)
        return path

    prolog.settings |= {"UNICRON_SHM_DIR": str(place), "UNICRON_SHM_FREE_MB": "1"}
    try:
        yield make
    finally:
        subprocess.run(["umount", place], check=True)


def test_a_user_who_fills_shared_memory_has_nobodys_state_removed(prolog: Hook, small_memory) -> None:
    """Neither with files of his own, nor with what looks like training state: whoever has left most goes first."""
    theirs = small_memory("unicron.41.r0.n1.65534", 65534, 2)
    small_memory("mine", 1234, 11)
    job = JOB | {"SLURM_JOB_UID": "1234"}
    assert prolog(**job) == 0 and theirs.exists() and "removed" not in prolog.said()
    (theirs.parent.parent / "mine").unlink()
    own = small_memory("unicron.77.r0.n1.1234", 1234, 12)
    assert prolog(**job) == 0 and theirs.exists() and own.exists(), "his own is his element's"
    assert prolog(**JOB, SLURM_JOB_UID="1235") == 0 and theirs.exists() and not own.exists()
    assert "removed: another user's job has the node, and such state left 30 % of its memory" in prolog.said()


def test_state_that_fills_most_of_shared_memory_is_removed_until_half_is_free(prolog: Hook, small_memory) -> None:
    kept = [small_memory(f"unicron.{n}.r0.n1.{65530 + n}", 65530 + n, size) for n, size in enumerate((3, 7, 4, 5))]
    held = os.open(kept[1].parent, os.O_RDONLY)
    try:
        fcntl.flock(held, fcntl.LOCK_SH)  # a job that runs: its state is neither removed nor counted
        assert prolog(**JOB, SLURM_JOB_UID="1234") == 0
    finally:
        os.close(held)
    assert [path.exists() for path in kept] == [True, True, True, False]


def test_a_folders_name_makes_the_prolog_remove_and_say_nothing_else(prolog: Hook, monkeypatch) -> None:
    """Whoever may write to shared memory chooses its names; the prolog is root, wherever it runs."""
    (prolog.folder / f"unicron.77\nother\n1\tjob 1: $(exit)`x`.n1.{os.getuid()}").mkdir()
    (prolog.folder / f"unicron.77.n1.{os.getuid()}\n").mkdir()
    (prolog.folder / "other").mkdir()
    (prolog.folder / "1").mkdir()
    monkeypatch.chdir(prolog.folder)
    prolog.settings["UNICRON_SHM_STRANGERS"] = "100"
    assert prolog(**JOB, SLURM_JOB_UID=str(os.getuid() + 1)) == 0
    assert {path.name for path in prolog.folder.iterdir() if path.is_dir()} == {
        "other",
        "1",
        f"unicron.77.n1.{os.getuid()}\n",  # it ends with no uid
    }
    (line,) = prolog.said().splitlines()
    assert f"/unicron.77?other?1?job?1????exit??x?.n1.{os.getuid()} removed" in line


def test_prolog_concludes_nothing_from_odd_gpu_names(prolog: Hook) -> None:
    prolog.settings["UNICRON_CHECK_GPU"] = "on"
    assert prolog(**JOB, SLURM_JOB_GPUS="0,$(exit 100)") == 0 and "check gpu can't tell" in prolog.said()


def test_prolog_does_not_wait_for_a_check_that_hangs(prolog: Hook) -> None:
    slow = prolog.folder / "slow"
    # A stat that hangs, as on a dead network file system; the script's PATH is replaced in a copy of it.
    (slow / "bin").mkdir(parents=True)
    (slow / "bin" / "stat").write_text("#!/bin/sh\nexec sleep 5\n")
    (slow / "bin" / "stat").chmod(0o755)
    text = PROLOG.read_text()
    assert "\nPATH=" in text
    copy = slow / "50-unicron"
    copy.write_text(text.replace("\nPATH=", f"\nPATH={slow}/bin:", 1))
    copy.chmod(0o755)
    prolog.settings["UNICRON_CHECK_SHM"] = "on"
    prolog.conf.write_text("".join(f"{key}={value}\n" for key, value in prolog.settings.items()))
    began = time.monotonic()
    done = subprocess.run([copy], env=JOB | {"UNICRON_PROLOG_CONF": str(prolog.conf)}, capture_output=True, timeout=10)
    assert done.returncode == 0 and time.monotonic() - began < LIMIT
    assert "check shm took too long" in prolog.said()


# --- epilog ---


@pytest.fixture
def epilog(tmp_path: Path) -> Hook:
    hook = Hook(EPILOG, tmp_path)
    hook.settings["UNICRON_CLEAN_DIRS"] = f"{tmp_path}/shm {tmp_path}/run relative"
    for name in ("shm", "run"):
        (tmp_path / name).mkdir()
    return hook


@pytest.fixture
def sleeper() -> Iterator:
    """sleeper(**environment) starts a process with just this environment."""
    started: list[subprocess.Popen] = []

    def start(user: int | None = None, ignores_term: bool = False, **environment: str) -> subprocess.Popen:
        command = ["/bin/sh", "-c", ("trap '' TERM; " if ignores_term else "") + "echo up; exec sleep 60"]
        process = subprocess.Popen(command, env=environment, user=user, stdout=subprocess.PIPE, start_new_session=True)
        assert process.stdout is not None and process.stdout.readline() == b"up\n"
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()


def ended(process: subprocess.Popen) -> bool:
    try:
        process.wait(0.3)
    except subprocess.TimeoutExpired:
        return False
    return True


ENDED_JOB = JOB | {"SLURM_JOB_UID": str(os.getuid())}


def test_epilog_ends_what_the_job_left_and_nothing_else(epilog: Hook, sleeper) -> None:
    mine = [
        sleeper(**JOB, UNICRON="1"),
        sleeper(**JOB, UNICRON_AGENT="ipc:///tmp/x"),
        sleeper(**JOB, UNICRON="1", ignores_term=True),
        sleeper(**JOB, UNICRON="1", SLURM_SCRIPT_CONTEXT="prolog_task"),  # where the cluster has a TaskProlog
        sleeper(**JOB, UNICRON="1", SLURM_CLUSTER_NAME="here"),
    ]
    others = [
        sleeper(**JOB),  # a job without Unicron
        sleeper(**JOB, UNICRON="0"),
        sleeper(**JOB | {"SLURM_JOB_ID": "8150"}, UNICRON="1"),  # another job, with an id that begins alike
        sleeper(**JOB | {"SLURM_JOB_ID": "81"}, UNICRON="1"),
        sleeper(**JOB | {"SLURMD_NODENAME": "n11"}, UNICRON="1"),  # another node on the same machine
        sleeper(X_SLURM_JOB_ID="815", SLURMD_NODENAME="n1", UNICRON="1"),  # a name that ends alike
        sleeper(SLURM_JOB_ID="815", UNICRON="1"),
        sleeper(**JOB, UNICRON="1", SLURM_SCRIPT_CONTEXT="epilog_slurmd"),  # an administrator's epilog
        sleeper(**JOB, UNICRON="1", SLURM_CLUSTER_NAME="there"),  # another cluster's node on the same machine
        sleeper(**JOB, UNICRON="1", SLURM_CLUSTER_NAME="here2"),
    ]
    if os.getuid() == 0:
        others.append(sleeper(**JOB, UNICRON="1", user=65534))  # another user who imitates the job
    assert epilog(**ENDED_JOB, SLURM_CLUSTER_NAME="here") == 0
    assert [ended(process) for process in mine] == [True] * len(mine), epilog.said()
    assert [process.poll() for process in others] == [None] * len(others)
    assert all(str(process.pid) in epilog.said() for process in mine)


def test_epilog_removes_the_files_of_its_job_only(epilog: Hook) -> None:
    shm, run = epilog.folder / "shm", epilog.folder / "run"
    for name in ("unicron-815-0", "unicron-8150-0", "unicron-81-0", "other-815-0"):
        (shm / name).write_bytes(b"x")
    # An element's own id is not its array's.
    agents = Path(socket_folder("800", {"SLURM_JOB_ID": "815", "TMPDIR": str(run)}))
    (agents / "deep").mkdir()
    assert agents.parent == run
    (run / "keep").mkdir()
    (run / "unicron-815-link").symlink_to(run / "keep")
    (run / "keep" / "file").touch()
    if os.getuid() == 0:
        os.chown(shm / "unicron-81-0", 65534, 65534)
        foreign = shm / "unicron-815-foreign"
        foreign.touch()
        os.chown(foreign, 65534, 65534)
    assert epilog(**ENDED_JOB) == 0
    kept = {"unicron-8150-0", "unicron-81-0", "other-815-0"} | ({"unicron-815-foreign"} if os.getuid() == 0 else set())
    assert {path.name for path in shm.iterdir()} == kept
    assert [path.name for path in run.iterdir()] == ["keep"] and (run / "keep" / "file").exists()


def test_epilog_removes_training_state_that_nobody_has_held_for_long(epilog: Hook) -> None:
    shm = epilog.folder / "shm"
    me, another = os.getuid(), os.getuid() + 1
    mine, old, held_one = f"unicron.815.n1.{me}", f"unicron.77.n1.{me}", f"unicron.78.n1.{me}"
    foreign = f"unicron.79.n1.{another}"  # who took another user's name
    names = (mine, old, held_one, foreign, f"unicron.77.n11.{me}", "unicron.77.n1.me")
    for name in names:
        (shm / name).mkdir()
        (shm / name / "slot-0.0.image").touch()
        os.utime(shm / name, (time.time() - 20 * 60,) * 2)
    os.utime(shm / mine)  # its element may come back
    held = os.open(shm / held_one, os.O_RDONLY)
    try:
        fcntl.flock(held, fcntl.LOCK_SH)
        assert epilog(**ENDED_JOB) == 0
        assert {path.name for path in shm.iterdir()} == set(names) - {old}
    finally:
        os.close(held)
    epilog.settings["UNICRON_KEEP_MINUTES"] = "0"
    assert epilog(**ENDED_JOB) == 0
    assert {path.name for path in shm.iterdir()} == {foreign, f"unicron.77.n11.{me}", "unicron.77.n1.me"}


@pytest.mark.skipif(os.getuid() != 0, reason="only root removes what is another user's")
@pytest.mark.parametrize(
    ("kind", "name"), [("epilog", "unicron-815-x"), ("epilog", "unicron.77.n1.5"), ("prolog", "unicron.77.n1.5")]
)
def test_root_removes_nothing_that_the_folders_owner_could_not(request, kind: str, name: str) -> None:
    """A user's folder may hold another user's, put there with a name that root's hooks remove."""
    games, victim = 5, 65534
    hook = request.getfixturevalue(kind)
    shm = hook.folder / "shm"
    shm.mkdir(exist_ok=True)
    twin = name.replace("815", "815-0").replace("77", "78")
    for folder in (shm / name, shm / twin):
        (folder / "own").mkdir(parents=True)
        (folder / "own" / "file").touch()
        for path in (folder, folder / "own", folder / "own" / "file"):
            os.chown(path, games, games)
    theirs = shm / name / "victim"
    theirs.mkdir(mode=0o700)
    (theirs / "precious").touch()
    os.chown(theirs, victim, victim)
    os.chown(theirs / "precious", victim, victim)
    (shm / twin).chmod(0o000)  # its owner may change that
    for folder in (shm / name, shm / twin):
        os.utime(folder, (time.time() - 20 * 60,) * 2)
    hook.settings |= {"UNICRON_SHM_DIR": str(shm), "UNICRON_SHM_STRANGERS": "100"}
    assert hook(**JOB | {"SLURM_JOB_UID": str(games if kind == "epilog" else victim)}) == 0
    assert (theirs / "precious").exists() and not (shm / name / "own").exists()
    assert not (shm / twin).exists(), "all of it was its owner's"
    assert f"{shm}/{name} left there: it holds what its owner may not remove" in hook.said()


# Puts something else in the place of the folder that is to be removed, in the moment in which the program runs.
SWAPS = """#!/bin/sh
[ -L {folder} ] || {{ mv {folder} {aside} && ln -s {target} {folder}; }}
exec /usr/bin/{program} "$@"
"""


def swapping(hook: Hook, program: str, target: Path) -> tuple[Path, Path]:
    """A copy of the hook during which a user swaps a folder of training state for a link, when it calls the program."""
    bin_, folder = hook.folder / "bin", hook.folder / "shm" / f"unicron.77.n1.{os.getuid()}"
    bin_.mkdir()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "image").touch()
    os.utime(folder, (time.time() - 20 * 60,) * 2)
    wrapper = bin_ / program
    wrapper.write_text(
        SWAPS.format(folder=folder, aside=hook.folder / "aside", target=target, program=program), encoding="utf8"
    )
    wrapper.chmod(0o755)
    copy = hook.folder / "50-unicron"
    copy.write_text(hook.path.read_text().replace("\nPATH=", f"\nPATH={bin_}:", 1))
    copy.chmod(0o755)
    return copy, folder


@pytest.mark.parametrize("program", ["flock", "sh", "stat"])
@pytest.mark.parametrize("there", [False, True])
@pytest.mark.parametrize("kind", ["prolog", "epilog"])
def test_root_follows_no_name_that_a_user_can_change(request, kind: str, program: str, there: bool) -> None:
    """A link to nothing makes no file, one to another's folder removes nothing in it."""
    hook = request.getfixturevalue(kind)
    target = hook.folder / "precious"
    if there:
        target.mkdir()
        (target / "file").touch()
    script, folder = swapping(hook, program, target)
    hook.path = script
    hook.settings |= {"UNICRON_SHM_DIR": str(folder.parent), "UNICRON_SHM_STRANGERS": "100"}
    uid = os.getuid() + (kind == "prolog")
    assert hook(**JOB | {"SLURM_JOB_UID": str(uid)}) == 0
    assert folder.is_symlink() or not folder.exists(), "it was swapped, or gone before"
    assert target.exists() == there and (not there or (target / "file").exists())


def test_a_user_who_fills_shared_memory_or_takes_the_probes_names_drains_nothing(prolog: Hook) -> None:
    """Proof is what only root can make: a size, a mount."""
    full = prolog.folder / "full"
    full.mkdir()
    prolog.settings |= {"UNICRON_CHECK_SHM": "on", "UNICRON_SHM_DIR": str(full), "UNICRON_SHM_FREE_MB": "1"}
    prolog.conf.write_text("".join(f"{key}={value}\n" for key, value in prolog.settings.items()))
    mounts = ["unshare", "--mount", *([] if os.getuid() == 0 else ["--map-root-user"]), "sh", "-c"]
    names = f"for n in $(seq 1 3000); do : >{full}/unicron-probe-$n; done"

    def checked(prepare: str) -> int:
        script = f"{prepare}; UNICRON_PROLOG_CONF={prolog.conf} exec {prolog.path}"
        done = subprocess.run([*mounts, script], env=JOB | {"PATH": os.environ["PATH"]}, timeout=60)
        return done.returncode

    mount = f"mount -t tmpfs -o size=4m none {full}"
    assert checked(f"{mount}; {names}; head -c 9m /dev/zero >{full}/file 2>/dev/null; true") == 0
    assert "0 MB free; jobs want 1" in prolog.said()
    assert checked(f"{mount}; mount -o remount,ro {full}") == 1
    assert checked(f"mount -t tmpfs -o size=512k none {full}") == 1


def test_epilog_kill_switches(epilog: Hook, sleeper) -> None:
    (epilog.folder / "shm" / "unicron-815-0").touch()
    process = sleeper(**JOB, UNICRON="1")
    epilog.settings |= {"UNICRON_CLEAN_PROCESSES": "off", "UNICRON_CLEAN_FILES": "off"}
    assert epilog(**ENDED_JOB) == 0
    assert process.poll() is None and (epilog.folder / "shm" / "unicron-815-0").exists()


@pytest.mark.parametrize("missing", ["SLURM_JOB_ID", "SLURM_JOB_UID", "SLURMD_NODENAME"])
def test_epilog_does_nothing_when_it_is_not_told_whose_it_is(epilog: Hook, sleeper, missing: str) -> None:
    (epilog.folder / "shm" / "unicron-815-0").touch()
    (epilog.folder / "shm" / "unicron--0").touch()
    process = sleeper(**JOB, UNICRON="1")
    for value in ("", "*"):
        if missing == "SLURMD_NODENAME" and value:
            continue
        assert epilog(**ENDED_JOB | {missing: value}) == 0
    assert process.poll() is None
    assert len(list((epilog.folder / "shm").iterdir())) == 2


@pytest.mark.slurm
def test_prolog_and_epilog_under_slurm(tmp_path_factory: pytest.TempPathFactory) -> None:
    """A job leaves a detached process and shared memory; slurmd's epilog clears them. A lost GPU drains the node."""
    folder = tmp_path_factory.mktemp("hooks")
    (folder / "shm").mkdir()
    cluster = LocalCluster(
        folder / "cluster",
        nodes=1,
        gpus_per_node=1,
        auth="none",
        config_lines=[f"Prolog={folder}/prolog", f"Epilog={folder}/epilog"],
    )
    # slurmd gives its hooks no variable of ours, so wrappers name the configuration.
    for hook, path in (("prolog", PROLOG), ("epilog", EPILOG)):
        conf = folder / f"{hook}.conf"
        conf.write_text(
            f"UNICRON_LOG={folder}/{hook}.log\nUNICRON_CLEAN_DIRS={folder}/shm\n"
            f"UNICRON_CHECK_GPU=on\nUNICRON_GPU_DEVICE={cluster.layout.gpu_dir}/gpu%s\n"
        )
        # Slurm fills in SLURM_JOB_GPUS for real devices only, and this cluster's are ordinary files.
        (folder / hook).write_text(f"#!/bin/sh\nSLURM_JOB_GPUS=0 UNICRON_{hook.upper()}_CONF={conf} exec {path}\n")
        (folder / hook).chmod(0o755)

    def call(*command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command,
            env=os.environ | cluster.env(),
            capture_output=True,
            text=True,
            timeout=20,
            cwd=folder,
            stdin=subprocess.DEVNULL,
        )

    cluster.up()
    try:
        script = (
            f"export UNICRON=1; setsid sh -c 'sleep 300 & echo $! > left' <&- >&- 2>&-; "
            f": > {folder}/shm/unicron-$SLURM_JOB_ID-0"
        )
        done = call("srun", "--gres=gpu:1", "sh", "-c", script)
        assert done.returncode == 0, done.stderr
        left = Path("/proc") / (folder / "left").read_text().strip() / "environ"
        wait_for(lambda: not left.exists() and not list((folder / "shm").iterdir()), "nothing is left of the job")
        wait_for(lambda: cluster.client().nodes()[0].states == {"IDLE"}, "the node is idle")
        assert not (folder / "prolog.log").exists()

        gpu = cluster.layout.gpu_dir / "gpu0"
        gpu.unlink()
        submitted = call("sbatch", "--parsable", "--gres=gpu:1", "--wrap=true")
        assert submitted.returncode == 0, submitted.stderr
        wait_for(lambda: "DRAIN" in cluster.client().nodes()[0].states, "the node is drained")
        assert "has no device file" in (folder / "prolog.log").read_text()
    finally:
        cluster.down()
