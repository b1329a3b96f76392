#!/usr/bin/env bash
# Slurm: the state RESV_DEL_HOLD outlives the hold. After `scontrol release` squeue goes on to print it until the job starts.
#
# Seen with 22.05.8 (Debian 12), alike with 24.11.5 and 26.05.5. By their sources no release takes the flag back before the
# start; REQUEUE_HOLD is kept likewise, SPECIAL_EXIT is not. Output, `squeue -o "%T|%r|%Q"`:
#   its reservation has ended:        RESV_DEL_HOLD|Reservation rx was deleted|0
#   released, the node is in use:     RESV_DEL_HOLD|Resources|4294901758
#   and `squeue --states=PENDING` does not list it
# Why it matters: a job that waits for its turn looks held for ever to whoever reads the word, and is missed by whoever
# lists what is pending. Only the priority (0 or not) tells.
#
# Needs: slurmctld, slurmd and slurm-client of one release, which are installed, and root, for reservations. Takes about
# two minutes: a reservation is at least a minute long.
set -euo pipefail
folder=$(mktemp -d)
export SLURM_CONF=$folder/slurm.conf
stop() {
    for file in "$folder"/*.pid; do [ -s "$file" ] && kill "$(cat "$file")" 2>/dev/null || true; done
    sleep 1
    rm -rf "$folder"
}
trap stop EXIT
mkdir "$folder/state" "$folder/spool"
host=$(hostname -s)
cat > "$SLURM_CONF" <<CONF
ClusterName=x
SlurmctldHost=$host(127.0.0.1)
SlurmctldPort=28621
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
SchedulerParameters=bf_interval=1,sched_interval=2
NodeName=n1 NodeHostname=$host NodeAddr=127.0.0.1 Port=28622 CPUs=2 RealMemory=500
PartitionName=main Nodes=n1 Default=YES MaxTime=60 State=UP OverSubscribe=EXCLUSIVE
CONF
slurmctld > "$folder/out" 2>&1 < /dev/null
slurmd -N n1 >> "$folder/out" 2>&1 < /dev/null
for _ in $(seq 60); do sinfo -h -o %T 2> /dev/null | grep -q idle && break; sleep 0.5; done
slurmctld -V
printf '#!/bin/sh\nsleep 300\n' > "$folder/job.sh"
shown() { squeue -h --states=all -j "$job" -o "%T|%r|%Q"; }
scontrol create reservation ReservationName=rx StartTime=now Duration=1 Users="$(id -un)" Nodes=n1 > /dev/null
job=$(sbatch --parsable -o /dev/null --reservation=rx --begin=now+1hour "$folder/job.sh")
for _ in $(seq 180); do shown | grep -q '^RESV_DEL_HOLD' && break; sleep 1; done
held=$(shown)
echo "its reservation has ended: $held"
other=$(sbatch --parsable -o /dev/null "$folder/job.sh")
for _ in $(seq 120); do [ "$(squeue -h -j "$other" -o %T)" = RUNNING ] && break; sleep 0.5; done
scontrol update JobId="$job" StartTime=now
scontrol release "$job"
for _ in $(seq 60); do shown | grep -q '|Resources|' && break; sleep 0.5; done
released=$(shown)
pending=$(squeue -h --states=PENDING -j "$job" -o %i)
echo "released, the node is in use: $released; --states=PENDING lists: '$pending'"
scancel "$job" "$other"
sleep 1
[[ $held == "RESV_DEL_HOLD|Reservation rx was deleted|0" ]]
[[ $released == "RESV_DEL_HOLD|Resources|"[1-9]* ]]
[ -z "$pending" ]
