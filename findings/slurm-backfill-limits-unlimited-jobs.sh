#!/usr/bin/env bash
# Slurm: which scheduler starts a job decides what its time limit is, where neither job nor partition has one.
#
# Seen with 22.05.8 (Debian 12); 24.11.5 and 26.05.5 show both, too, and src/plugins/sched/backfill/backfill.c of all has
# the reason: backfill takes a year for a partition without a limit. Output, `squeue -o "%l %L"` of the running job:
#   started by the main scheduler:  UNLIMITED UNLIMITED (below: a cluster with sched/builtin, so without backfill)
#   started by backfill:            365-00:00:00 364-23:59:59
# Why it matters: on one cluster two equal jobs differ, from start to start. A program that reads "UNLIMITED" as "no
# limit", or takes a limit for its user's wish, sees either at random.
#
# Needs: slurmctld, slurmd and slurm-client of one release, which are installed. Any user may run it.
set -euo pipefail
folder=$(mktemp -d)
export SLURM_CONF=$folder/slurm.conf
stop() {
    for file in "$folder"/*.pid; do [ -s "$file" ] && kill "$(cat "$file")" 2>/dev/null || true; done
    sleep 1
    rm -rf "$folder/state" "$folder/spool"
}
trap 'stop; rm -rf "$folder"' EXIT

limit_with() { # the scheduler's lines -> the limit of a running job that asked for none
    mkdir -p "$folder/state" "$folder/spool"
    host=$(hostname -s)
    cat > "$SLURM_CONF" <<CONF
ClusterName=x
SlurmctldHost=$host(127.0.0.1)
SlurmctldPort=28611
SlurmUser=$(id -un)
SlurmdUser=$(id -un)
AuthType=auth/none
CredType=cred/none
StateSaveLocation=$folder/state
SlurmdSpoolDir=$folder/spool
SlurmctldPidFile=$folder/slurmctld.pid
SlurmdPidFile=$folder/slurmd.pid
SlurmctldLogFile=$folder/slurmctld.log
SlurmdLogFile=$folder/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SlurmdParameters=config_overrides
$1
NodeName=n1 NodeHostname=$host NodeAddr=127.0.0.1 Port=28612 CPUs=2 RealMemory=500
PartitionName=main Nodes=n1 Default=YES MaxTime=INFINITE State=UP
CONF
    slurmctld > "$folder/out" 2>&1 < /dev/null
    slurmd -N n1 >> "$folder/out" 2>&1 < /dev/null
    for _ in $(seq 60); do sinfo -h -o %T 2> /dev/null | grep -q idle && break; sleep 0.5; done
    printf '#!/bin/sh\nsleep 100\n' > "$folder/job.sh"
    job=$(sbatch --parsable -o /dev/null "$folder/job.sh")
    for _ in $(seq 120); do [ "$(squeue -h -j "$job" -o %T)" = RUNNING ] && break; sleep 0.5; done
    squeue -h -j "$job" -o %l
    scancel "$job"
    sleep 2
    stop
}

slurmctld -V
plain=$(limit_with "SchedulerType=sched/builtin")
backfilled=$(limit_with "SchedulerParameters=defer,sched_interval=-1,bf_interval=1")
echo "main scheduler: $plain, backfill: $backfilled"
[ "$plain" = UNLIMITED ] && [ "$backfilled" = 365-00:00:00 ]
