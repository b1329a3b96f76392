"""LocalCluster: slurmctld, many slurmd and munged, privately, in a state folder, as any user."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import functools
import os
import pwd
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path

import msgspec

from unicron_ctl.lab.cluster import accounting, binaries, configuration, daemons, network, ports, tombstone
from unicron_ctl.lab.cluster import cluster_processes as processes
from unicron_ctl.lab.cluster.cluster_layout import Layout, Spec
from unicron_ctl.lab.cluster.cluster_processes import Process
from unicron_ctl.lab.cluster.cluster_status import ClusterStatus, LinksStatus, cluster_status, slurmds_of
from unicron_ctl.lab.cluster.link_faults import Links, check_host
from unicron_ctl.lab.cluster.network import HEAD, IPV4, OUTSIDE
from unicron_ctl.shared.slurm.command_line import CommandLineClient
from unicron_ctl.shared.slurm.slurm_client import NodeInfo, SlurmError
from unicron_ctl.shared.system.errors import WRONG_USE, UserError

_START_LIMIT = 30.0  # seconds from the first daemon to nodes that answer
_KILL_LIMIT = 60.0  # on a busy machine killed processes take a while to go
_ATTEMPTS = 3
_SLURM_PORTS = (6817, 6818)  # slurmctld's and slurmd's, if each host has its own network


class LocalCluster:
    """A private Slurm cluster of virtual nodes n1 ... nN, each with its own slurmd, in one partition, `main`.

    `plugstack_lines` go to plugstack.conf, `config_lines` to slurm.conf (before the nodes), `topology_lines`, a tree of
    switches, to topology.conf. With `links`, which needs root, each node and the head have their own network namespace,
    and the property `links` cuts and mends the links between them; `family` is the family of their addresses. With
    `with_accounting` there are slurmdbd and a MariaDB, for `sacct`. Jobs and their history live as long as the cluster
    is up. Methods raise UserError, with one line, for problems that users can mend.
    """

    def __init__(
        self,
        state_dir: str | os.PathLike[str],
        nodes: int = 6,
        gpus_per_node: int = 1,
        plugstack_lines: Sequence[str] = (),
        auth: str = "munge",
        config_lines: Sequence[str] = (),
        links: bool = False,
        topology_lines: Sequence[str] = (),
        with_accounting: bool = False,
        family: str = IPV4,
    ) -> None:
        self.layout = Layout(state_dir)
        lines = tuple(plugstack_lines), tuple(config_lines), tuple(topology_lines)
        self.spec = Spec(nodes, gpus_per_node, auth, *lines, links=links, accounting=with_accounting, family=family)
        self.spec.check()

    @classmethod
    def load(cls, state_dir: str | os.PathLike[str]) -> LocalCluster:
        """Return the cluster that was last started in this folder. Raises UserError if there was none."""
        spec = Layout(state_dir).load()
        if spec is None:
            raise UserError(f"no cluster in {state_dir}; start one with: unicronctl cluster up")
        cluster = cls(state_dir)
        cluster.spec = spec
        return cluster

    def env(self) -> dict[str, str]:
        """Return the variables with which Slurm's and munge's programs reach this cluster."""
        added = {"SLURM_CONF": str(self.layout.slurm_conf), "PATH": binaries.SEARCH_PATH}
        if self.spec.auth == "munge":
            added["MUNGE_SOCKET"] = str(self.layout.munge_socket)
        return added

    def client(self, timeout: float = 10.0) -> CommandLineClient:
        """Return a Slurm client for this cluster."""
        return CommandLineClient(env=self.env(), timeout=timeout)

    # --- links -------------------------------------------------------------------------------------------------------

    @property
    def links(self) -> Links:
        """Return the links, to cut and mend. Raises UserError (wrong use) for a cluster without links."""
        self._check_links()
        return Links(self.layout.network, self.spec.node_names)

    def address(self, host: str) -> str:
        """Return the address of a node or of `head`, of IPv4 unless it has none. Raises UserError (wrong use) for a
        cluster without links."""
        self._check_links()
        check_host(host, self.spec.node_names)
        return self.spec.address(host)

    def command_prefix(self, host: str) -> list[str]:
        """Return the words that make a command run on a node or on `head`. Raises UserError (wrong use)."""
        self._check_links()
        check_host(host, self.spec.node_names)
        return self.layout.network.command_prefix(host)

    def _check_links(self) -> None:
        if not self.spec.links:
            raise UserError("this cluster has no links; start one with: unicronctl cluster up --links", WRONG_USE)
        if not self.layout.network.complete(self.spec.node_names):
            raise UserError(f"the cluster in {self.layout.state_dir} is down; start it with: unicronctl cluster up")

    # --- up and down -------------------------------------------------------------------------------------------------

    def up(self) -> None:
        """Start all of the cluster that does not run, and wait until every node answers. If it fails, nothing runs."""
        programs = self._programs()
        with self._lock():
            saved, running = self.layout.load(), self.processes()
            if running and saved is not None and not saved.same_wish(self.spec):
                raise UserError(
                    f"a different cluster ({saved.nodes} nodes) is up in {self.layout.state_dir}; "
                    "run 'unicronctl cluster down' first",
                    WRONG_USE,
                )
            if saved is not None and self._is_partly_up(running):
                self.spec = saved
                self._start_rest(programs, running)
            else:
                self._start_fresh(programs)

    def _is_partly_up(self, running: Sequence[Process]) -> bool:
        """Whether the missing parts can be started, so that the cluster need not begin anew."""
        kinds = {process.kind for process in running}
        return (
            ("slurmctld" in kinds or bool(slurmds_of(running)))
            and ("munged" in kinds or self.spec.auth == "none")
            and (not self.spec.links or self.layout.network.complete(self.spec.node_names))
            and self.layout.slurm_conf.exists()
        )

    def _start_rest(self, programs: dict[str, str], running: Sequence[Process]) -> None:
        kinds = {process.kind for process in running}
        if self.spec.accounting:
            self._start_accounting(programs, kinds)
        if "slurmctld" not in kinds:
            self._start_controller(programs["slurmctld"])
        missing = [name for name in self.spec.node_names if name not in slurmds_of(running)]
        busy = {process.node for process in running if process.kind == "stepd"}
        # A node that reports a reboot is broken to Slurm, so only nodes that lost a job report one.
        taken = {e.node for e in self.client().elements() if e.node} if missing else set[str]()
        if rebooted := (taken - busy) & set(missing):
            _next_second()
        self._start_nodes(programs, missing, rebooted)

    def down(self) -> None:
        """End all processes of the cluster and of its jobs at once, and remove its sockets. The logs stay."""
        layout = self.layout
        if not (layout.state_dir.is_dir() or layout.short_dir.is_dir() or layout.network.present()):
            return
        with self._lock():
            self._clear()

    def _clear(self) -> None:
        try:
            processes.kill_all(self.processes, _KILL_LIMIT)
        except PermissionError:
            raise UserError(f"the cluster in {self.layout.state_dir} is not yours; run this as its user") from None
        except TimeoutError as error:
            raise UserError(f"the cluster in {self.layout.state_dir} cannot be ended: {error}") from None
        self.layout.network.remove()
        shutil.rmtree(self.layout.short_dir, ignore_errors=True)

    # --- single nodes ------------------------------------------------------------------------------------------------

    def power_off(self, node: str) -> list[Process]:
        """Kill all that runs on a node at once, as a power failure would. Slurm is not informed. Return the victims.

        With links the node is cut off first, so that no host sees the end of a connection.
        """
        self._check_node(node)
        here = [process for process in self.processes() if process.node == node]
        if self.spec.links:
            self.links.power([node], on=False)
        silent = tombstone.ports_of(process.pid for process in here if process.kind != "tombstone")
        killed = processes.kill_all(lambda: [p for p in self.processes() if p.node == node], _KILL_LIMIT)
        self._empty_memory(node)
        if self.spec.links:
            return killed
        if silent:
            command = [sys.executable, tombstone.__file__, str(self.layout.slurm_conf), node, *map(str, silent)]
            self._launch(f"tombstone-{node}", command, node)
        return killed

    def power_on(self, node: str) -> None:
        """Start the slurmd of a node again, and wait until it has registered. A node that was set down stays down."""
        self._check_node(node)
        with self._lock():
            running = self.processes()
            if not any(process.kind == "slurmctld" for process in running):
                raise UserError(f"the cluster in {self.layout.state_dir} is down; start it with: unicronctl cluster up")
            if node not in slurmds_of(running):
                stones = [p for p in running if p.kind == "tombstone" and p.node == node]
                _next_second()  # while its ports are held
                processes.kill_all(lambda: [p for p in stones if processes.is_alive(p.pid)], _KILL_LIMIT)
                self._start_again(node)

    def _start_again(self, node: str) -> None:
        """Start a slurmd, and try again if its port is taken: other clusters take ports for a moment to test them."""
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                return self._start_nodes(self._programs(), [node], {node})
            except UserError as error:
                if attempt == _ATTEMPTS or "Address already in use" not in str(error):
                    raise
            _next_second()

    def start_slurmctld(self) -> None:
        """Start slurmctld again if it has ended, but no node."""
        with self._lock():
            if not any(process.kind == "slurmctld" for process in self.processes()):
                self._start_controller(self._programs()["slurmctld"])

    def _check_node(self, node: str) -> None:
        if node not in self.spec.node_names:
            raise UserError(f"no node {node!r}; this cluster has n1 to n{self.spec.nodes}", WRONG_USE)

    # --- looking -----------------------------------------------------------------------------------------------------

    def processes(self) -> list[Process]:
        """Return all living processes of the cluster and its jobs."""
        return processes.find(self.layout.marks)

    def status(self) -> ClusterStatus:
        """Return the state of the daemons, the links and Slurm's nodes."""
        running, known = self.processes(), dict[str, NodeInfo]()
        if any(process.kind == "slurmctld" for process in running):
            with contextlib.suppress(SlurmError):
                known = {info.name: info for info in self.client(timeout=5.0).nodes()}
        return cluster_status(self.layout, self.spec, running, known, self._links_status())

    def _links_status(self) -> LinksStatus | None:
        """Return the links' status; None if there are no links, or they are down."""
        if not self.spec.links or not self.layout.network.complete(self.spec.node_names):
            return None
        addresses = {host: self.spec.address(host) for host in (HEAD, *self.spec.node_names, OUTSIDE)}
        faults = msgspec.structs.asdict(self.links.faults())
        return LinksStatus(network=self.spec.network, addresses=addresses, **faults)

    # --- starting ----------------------------------------------------------------------------------------------------

    def _programs(self) -> dict[str, str]:
        wanted = ["slurmctld", "slurmd", "scontrol", "sinfo", "squeue"]
        if self.spec.links:
            if os.getuid():
                raise UserError("links of their own need root; leave --links away, or run this as root")
            wanted += ["ip", "nft", "nsenter", "unshare", "hostname"]
        if self.spec.accounting:
            wanted += accounting.PROGRAMS
        return binaries.locate(wanted + (["munged"] if self.spec.auth == "munge" else []))

    def _start_fresh(self, programs: dict[str, str]) -> None:
        """Start everything from nothing; again with other ports if another program took one of them meanwhile."""
        if self.spec.links:
            for folder in network.abandoned_folders():
                LocalCluster(folder)._clear()
        for attempt in range(1, _ATTEMPTS + 1):
            self._clear()
            try:
                self._write_files(programs, seed=f"{self.layout.state_dir} {attempt}")
                if self.spec.auth == "munge":
                    self._start_munged(programs["munged"])
                if self.spec.accounting:
                    self._start_accounting(programs)
                self._start_controller(programs["slurmctld"])
                self._start_nodes(programs, self.spec.node_names)
                return
            except BaseException:
                self._clear()
                if attempt == _ATTEMPTS or self.spec.links or all(map(ports.is_free, self.spec.ports)):
                    raise

    def _write_files(self, programs: dict[str, str], seed: str) -> None:
        layout, user = self.layout, _user_name()
        layout.make_short_dir()
        shutil.rmtree(layout.save_dir, ignore_errors=True)
        for folder in (layout.etc_dir, layout.log_dir, layout.save_dir, layout.gpu_dir, layout.spool_dir):
            folder.mkdir(parents=True, exist_ok=True)
        for name in self.spec.node_names:
            (layout.spool_dir / name).mkdir(exist_ok=True)
            self._empty_memory(name)
        if self.spec.links:
            taken = layout.network.register(layout.state_dir)
            chosen = _SLURM_PORTS[:1] + _SLURM_PORTS[1:] * self.spec.nodes
            self.spec = dataclasses.replace(self.spec, ports=chosen, network=taken)
        else:
            count = 1 + self.spec.nodes + accounting.ports_needed(self.spec)
            self.spec = dataclasses.replace(self.spec, ports=ports.choose(count, seed))
        layout.save(self.spec)  # before the first process, so that `down` always finds all of them
        if self.spec.links:
            layout.network.make(self.spec.network, self.spec.node_names, self.spec.family)
        for path in configuration.gpu_files(layout, self.spec):
            Path(path).touch()
        hostname = socket.gethostname().split(".")[0]
        version = binaries.slurm_version(programs["slurmctld"])
        layout.slurm_conf.write_text(configuration.slurm_conf(layout, self.spec, user, hostname, version))
        if self.spec.accounting:
            accounting.write_files(layout, self.spec, user)
        (layout.etc_dir / "gres.conf").write_text(configuration.gres_conf(layout, self.spec))
        for name, lines in (("plugstack", self.spec.plugstack_lines), ("topology", self.spec.topology_lines)):
            (layout.etc_dir / f"{name}.conf").write_text("".join(f"{line}\n" for line in lines))
        layout.task_prolog.write_text(configuration.task_prolog(layout))
        layout.task_prolog.chmod(0o755)

    def _empty_memory(self, node: str) -> None:
        """Empty a node's memory folder, as a power failure does. Any user's jobs may write there."""
        self.layout.memory_dir.mkdir(exist_ok=True)
        self.layout.memory_dir.chmod(0o755)  # whatever the umask
        folder = self.layout.memory_dir / node
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        folder.chmod(0o1777)

    def _start_munged(self, program: str) -> None:
        folder = self.layout.munge_dir
        folder.mkdir(mode=0o755, exist_ok=True)
        folder.chmod(0o755)
        key = folder / "key"
        key.touch(mode=0o600)
        key.write_bytes(os.urandom(128))
        options = {"socket": "socket", "key-file": "key", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
        command = [program, "--foreground", *(f"--{option}={folder / file}" for option, file in options.items())]
        self._start_daemon("munged", command, lambda: daemons.accepts(self.layout.munge_socket))

    def _start_accounting(self, programs: dict[str, str], running: Collection[str] = ()) -> None:
        """Start MariaDB and slurmdbd, as far as they do not run. slurmctld registers the cluster with slurmdbd."""
        layout, user = self.layout, _user_name()
        if not layout.database_dir.is_dir():
            layout.database_dir.mkdir(mode=0o700)
            command = accounting.install_command(programs["mariadb-install-db"], layout, user)
            with open(layout.log_dir / "mariadb-install-db.out", "w") as out:
                done = subprocess.run(command, stdout=out, stderr=subprocess.STDOUT, timeout=_START_LIMIT)
            if done.returncode:
                raise UserError(f"no database could be made: {daemons.last_words(layout, 'mariadb-install-db')}")
        commands = {
            "mariadbd": accounting.database_command(programs["mariadbd"], layout, self.spec, user),
            "slurmdbd": [programs["slurmdbd"], "-D"],
        }
        for name, port in zip(commands, reversed(self.spec.ports), strict=False):
            if name not in running:
                self._start_daemon(name, commands[name], functools.partial(daemons.accepts, port))

    def _start_controller(self, program: str) -> None:
        self._start_daemon("slurmctld", [program, "-D", "-f", str(self.layout.slurm_conf)], self._answers)

    def _start_daemon(self, name: str, command: list[str], ready: Callable[[], bool]) -> None:
        """Start a daemon on the head, and wait until it is ready."""
        daemons.wait_until_ready(self.layout, name, self._launch(name, command, HEAD), ready, _START_LIMIT)

    def _start_nodes(self, programs: dict[str, str], names: Sequence[str], rebooted: Collection[str] = ()) -> None:
        """Start slurmds, and wait until all have registered. Those of `rebooted` nodes report to Slurm that their jobs
        are gone."""
        if self.spec.links:
            self.links.power(names, on=True)
        began = float(int(time.time()))  # Slurm reports start times in whole seconds
        pids = {}
        for name in names:
            if name in rebooted:
                # As on a diskless node. Otherwise a requeued job that comes back here would find its own old script.
                shutil.rmtree(self.layout.spool_dir / name, ignore_errors=True)
                (self.layout.spool_dir / name).mkdir()
            command = [programs["slurmd"], "-D", "-f", str(self.layout.slurm_conf), "-N", name]
            pids[name] = self._launch(f"slurmd-{name}", command + (["-b"] if name in rebooted else []), name)
        deadline = time.monotonic() + _START_LIMIT
        for name, pid in pids.items():
            ready = functools.partial(self._registered, name, began)
            daemons.wait_until_ready(self.layout, f"slurmd-{name}", pid, ready, deadline - time.monotonic())

    def _launch(self, name: str, command: list[str], host: str) -> int:
        """Start a daemon on a node or on `head`, and return its process id."""
        return daemons.launch(self.layout, name, (self.command_prefix(host) if self.spec.links else []) + command)

    def _answers(self) -> bool:
        try:
            return len(self.client(timeout=3.0).nodes()) == self.spec.nodes
        except SlurmError:
            return False

    def _registered(self, name: str, since: float) -> bool:
        try:
            info = next((info for info in self.client(timeout=3.0).nodes() if info.name == name), None)
        except SlurmError:
            return False
        return (
            info is not None
            and info.slurmd_start is not None
            and info.slurmd_start >= since
            and not info.states & {"UNKNOWN", "NOT_RESPONDING"}
        )

    @contextlib.contextmanager
    def _lock(self, limit: float = 60.0) -> Iterator[None]:
        """Allow one up or down at a time in a state folder. The kernel releases the lock if its holder dies."""
        folder = self.layout.state_dir
        try:
            folder.mkdir(parents=True, exist_ok=True)
            handle = open(self.layout.lock_file, "w")
        except OSError as error:
            raise UserError(f"cannot write {folder} ({error.strerror}); name another with --state-dir") from None
        with handle:
            deadline = time.monotonic() + limit
            while True:
                try:
                    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > deadline:
                        raise UserError(f"another 'unicronctl cluster' is using {folder}; try again") from None
                    time.sleep(0.05)
            yield


def _next_second() -> None:
    """Wait for the next second: Slurm compares times in whole seconds, and does not notice a reboot within one."""
    time.sleep(1.0 - time.time() % 1.0)


def _user_name() -> str:
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        raise UserError(f"user id {os.getuid()} has no name in the password database, and Slurm needs one") from None
