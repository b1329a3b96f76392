#!/usr/bin/env bash
# tensorflow 2.21.0's SlurmClusterResolver gives tasks the addresses of other nodes, where Slurm counts the nodes without
# leading zeros.
#
# Seen: it sorts the names of SLURM_STEP_NODELIST as text, "to make sure the order is the same for each run", and hands the
# addresses out by SLURM_PROCID, which Slurm counts in its own, numerical order. On n[1-10] with a task a node rank 1, which
# runs on n2, is told that it is worker 1 at n10:8888, and rank 9 on n10 that it is at n9. With n[01-10] all is well.
#
# Why it matters: a server that binds to the told address fails on the second of ten nodes, and not in any test on two. A
# launcher that tells a world by these variables cannot mend it by the order of the names.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q --disable-pip-version-check tensorflow-cpu==2.21.0 > "$folder/pip.log" 2>&1 || {
    cat "$folder/pip.log" >&2
    exit 1
}
"$folder/env/bin/python" - 2> "$folder/errors" <<'PY' || { cat "$folder/errors" >&2; exit 1; }
import os

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
os.environ["TF_ENABLE_ONEDNN_OPTS"] = "0"
import tensorflow

SlurmClusterResolver = tensorflow.distribute.cluster_resolver.SlurmClusterResolver

# What srun tells the ten tasks of `srun -N10 --ntasks-per-node=1` on n1 to n10; task 1 runs on n2.
os.environ.update(SLURM_STEP_NODELIST="n[1-10]", SLURM_STEP_NUM_TASKS="10", SLURM_STEP_TASKS_PER_NODE="1(x10)")
for rank in (0, 1, 2, 9):
    os.environ.update(SLURM_PROCID=str(rank), CUDA_VISIBLE_DEVICES="0")
    resolver = SlurmClusterResolver()
    cluster = resolver.cluster_spec()
    task = resolver.get_task_info()
    told = cluster.task_address(*task)
    print(f"rank {rank} runs on n{rank + 1} and is told that it is {task[0]} {task[1]} at {told}")
    assert told == {0: "n1", 1: "n10", 2: "n2", 9: "n9"}[rank] + ":8888"
PY
