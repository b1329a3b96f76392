"""Writes slurm.conf and gres.conf of a local cluster. Pure (docs/local-cluster.md, slurm.conf(5))."""

from __future__ import annotations

from unicron_ctl.lab.cluster import accounting
from unicron_ctl.lab.cluster.cluster_layout import Layout, Spec
from unicron_ctl.lab.cluster.network import HEAD, IPV6

CPUS_PER_NODE = 4
MEMORY_MB = 2000


def slurm_conf(layout: Layout, spec: Spec, user: str, hostname: str, version: tuple[int, int]) -> str:
    """Return the text of slurm.conf for a release of Slurm, (year, month). `hostname` is this machine's; a cluster with
    links has its own names."""
    head = f"{HEAD}({spec.address(HEAD)})" if spec.links else f"{hostname}(127.0.0.1)"
    auth_info = ["cred_expire=5"]  # a requeued job waits this long before it may start again; the default is 120 s
    if spec.auth == "munge":
        auth_info.insert(0, f"socket={layout.munge_socket}")
    gres = f" Gres=gpu:{spec.gpus_per_node}" if spec.gpus_per_node else ""
    lines = [
        f"ClusterName={layout.cluster_name}",
        f"SlurmctldHost={head}",
        f"SlurmctldPort={spec.ports[0]}",
        f"SlurmUser={user}",
        f"SlurmdUser={user}",
        f"AuthType=auth/{spec.auth}",
        f"CredType=cred/{spec.auth}",
        f"AuthInfo={','.join(auth_info)}",
        f"StateSaveLocation={layout.save_dir}",
        f"SlurmdSpoolDir={layout.spool_dir}/%n",
        f"SlurmctldPidFile={layout.short_dir}/slurmctld.pid",
        f"SlurmdPidFile={layout.short_dir}/slurmd-%n.pid",
        f"SlurmctldLogFile={layout.log_dir}/slurmctld.log",
        f"SlurmdLogFile={layout.log_dir}/slurmd-%n.log",
        "SlurmctldDebug=info",
        "SlurmdDebug=info",
        "LogTimeFormat=iso8601_ms",
        f"PlugStackConfig={layout.etc_dir}/plugstack.conf",
        f"TaskProlog={layout.task_prolog}",
        "MailProg=/bin/true",
        # Works as any user; cgroups need root.
        "ProctrackType=proctrack/linuxproc",
        "TaskPlugin=task/none",
        "JobAcctGatherType=jobacct_gather/none",
        *accounting.slurm_lines(layout, spec),
        "MpiDefault=none",
        "SwitchType=switch/none" if version < (23, 11) else "",
        "SelectType=select/cons_tres",
        "SelectTypeParameters=CR_Core",
        "SchedulerType=sched/backfill",
        "SchedulerParameters=bf_interval=1,sched_interval=2,sched_min_interval=0",
        # The virtual nodes' CPUs and memory are what this file says, not what the machine has.
        "SlurmdParameters=config_overrides",
        # 2 would put a node that was set down back into service while its slurmd lives.
        "ReturnToService=1",
        "SlurmdTimeout=10",
        "SlurmctldTimeout=10",
        "MessageTimeout=10",
        "InactiveLimit=0",
        "CommunicationParameters=EnableIPv6,DisableIPv4" if spec.family == IPV6 else "",
        "KillWait=2",
        "WaitTime=0",
        "UnkillableStepTimeout=20",
        "MinJobAge=300",
        "JobRequeue=1",
        "MaxArraySize=4001",
        "GresTypes=gpu" if spec.gpus_per_node else "",
        "TopologyPlugin=topology/tree" if spec.topology_lines else "",
        *(_with_socket(line, auth_info) for line in spec.config_lines),
        f"NodeName=DEFAULT CPUs={CPUS_PER_NODE} Boards=1 SocketsPerBoard=1 CoresPerSocket={CPUS_PER_NODE} "
        f"ThreadsPerCore=1 RealMemory={MEMORY_MB} State=UNKNOWN{gres}",
        *(
            f"NodeName={name} {_place(spec, name, hostname)} Port={port}"
            for name, port in zip(spec.node_names, spec.ports[1 : 1 + spec.nodes], strict=True)
        ),
        f"PartitionName=main Nodes=n[1-{spec.nodes}] Default=YES MaxTime=INFINITE State=UP OverSubscribe=EXCLUSIVE",
    ]
    return "\n".join(line for line in lines if line) + "\n"


def _with_socket(line: str, auth_info: list[str]) -> str:
    """Return a user's line. In AuthInfo the socket of the cluster's own munge is kept: nothing works without it."""
    key, _, value = line.partition("=")
    sockets = [part for part in auth_info if part.startswith("socket=")]
    if key.strip().lower() != "authinfo" or not sockets or "socket=" in value:
        return line
    return f"{line.strip()},{sockets[0]}"


def task_prolog(layout: Layout) -> str:
    """Return a script that gives each virtual node its own shared memory. The nodes share one /dev/shm, which would
    outlive the cluster and a node's power failure. A step inherits the setting of the batch script, which may run on
    another node."""
    return f"""#!/bin/sh
case "$UNICRON_MEMORY_DIR" in
"" | {layout.memory_dir}/*) echo "export UNICRON_MEMORY_DIR={layout.memory_dir}/$SLURMD_NODENAME" ;;
esac
"""


def _place(spec: Spec, node: str, hostname: str) -> str:
    """Return how slurmctld reaches a node's slurmd. With links, a node's own name is its hostname."""
    if spec.links:
        return f"NodeAddr={spec.address(node)}"
    return f"NodeHostname={hostname} NodeAddr=127.0.0.1"


def gres_conf(layout: Layout, spec: Spec) -> str:
    """Return the text of gres.conf, with an empty file for each GPU: without files Slurm calls the node invalid."""
    return "".join(f"Name=gpu File={path}\n" for path in gpu_files(layout, spec))


def gpu_files(layout: Layout, spec: Spec) -> list[str]:
    """Return the files that stand for GPUs. All virtual nodes share them."""
    return [f"{layout.gpu_dir}/gpu{i}" for i in range(spec.gpus_per_node)]
