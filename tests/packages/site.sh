#!/bin/bash
# A site as an admin of Slurm has it before Unicron comes: munge, slurmctld, two nodes of one GPU each, all on this machine;
# a user, and his environment with torch. Run once in a fresh root; `site.sh start` starts it again after a boot.
set -euo pipefail
host=$(hostname)
start() {
    mkdir -p /run/munge && chown munge: /run/munge
    systemctl daemon-reload
    systemctl restart munge slurmctld slurmd@n1 slurmd@n2
    for _ in $(seq 60); do
        [ "$(sinfo -h -t idle -o %D)" = 2 ] && return
        sleep 1
    done
    sinfo -R
    echo "the nodes do not come up" >&2
    exit 1
}
if [ "${1:-}" = start ]; then
    start
    exit
fi
apt-get update -q >/dev/null
apt-get install -y -q --no-install-recommends munge python3-venv slurm-client slurmctld slurmd >/dev/null
systemctl disable --now slurmd 2>/dev/null || true
mkdir -p /etc/slurm/plugstack.conf.d /var/lib/slurm/slurmctld /var/log/slurm
chown slurm /var/lib/slurm/slurmctld /var/log/slurm
cat >/etc/slurm/slurm.conf <<X
ClusterName=site
SlurmctldHost=$host(127.0.0.1)
SlurmUser=slurm
AuthType=auth/munge
GresTypes=gpu
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmctldPort=${SITE_PORT:-17100}
StateSaveLocation=/var/lib/slurm/slurmctld
SlurmdSpoolDir=/var/lib/slurm/slurmd.%n
SlurmdPidFile=/run/slurmd.%n.pid
SlurmctldLogFile=/var/log/slurm/slurmctld.log
SlurmdLogFile=/var/log/slurm/slurmd.%n.log
ReturnToService=1
JobRequeue=1
PlugStackConfig=/etc/slurm/plugstack.conf
NodeName=n1 NodeHostname=$host NodeAddr=127.0.0.1 Port=17101 CPUs=2 RealMemory=3000 Gres=gpu:1
NodeName=n2 NodeHostname=$host NodeAddr=127.0.0.1 Port=17102 CPUs=2 RealMemory=3000 Gres=gpu:1
PartitionName=gpu Nodes=n1,n2 Default=YES State=UP OverSubscribe=EXCLUSIVE
X
echo 'include /etc/slurm/plugstack.conf.d/*' >/etc/slurm/plugstack.conf
case $(slurmd -V) in # a plugin that nothing here uses: 22.05 has no other way to be without
*" 22."*) echo 'CgroupPlugin=cgroup/v1' ;;
*) echo 'CgroupPlugin=disabled' ;;
esac >/etc/slurm/cgroup.conf
echo 'Name=gpu File=/dev/zero' >/etc/slurm/gres.conf
cat >/etc/systemd/system/slurmd@.service <<X
[Unit]
After=munge.service slurmctld.service
[Service]
ExecStart=/usr/sbin/slurmd -D -N %i
KillMode=process
X
useradd -m -s /bin/bash alice
[ -e /opt/train ] || python3 -m venv /opt/train
/opt/train/bin/python -m pip install -q --disable-pip-version-check ${PIP_ARGS:-} torch numpy
start
