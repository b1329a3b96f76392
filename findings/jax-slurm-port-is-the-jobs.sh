#!/usr/bin/env bash
# jax 0.10.2 under Slurm: the coordinator's port is made of SLURM_JOB_ID alone.
#
# Seen: the five variables of a step are all that jax.distributed.initialize() looks at, and it takes the port
# 61440 + SLURM_JOB_ID % 4096 on the first host of SLURM_STEP_NODELIST. So two steps of one allocation, `srun` beside
# `srun`, meet at the same port of the same host, whatever their SLURM_STEP_ID is; two jobs whose ids differ by 4096 do so
# on a shared host; and the elements of one job array, whose SLURM_JOB_ID differ, never meet, even where somebody gives
# them the names of one world.
#
# Why it matters: who starts JAX's processes as one world out of several Slurm jobs has to set JAX_COORDINATOR_ADDRESS,
# and two JAX programs in one allocation need different ones.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q --disable-pip-version-check jax==0.10.2 jaxlib==0.10.2 > "$folder/pip.log" 2>&1 || {
    cat "$folder/pip.log" >&2
    exit 1
}
"$folder/env/bin/python" - <<'PY'
import os

from jax._src.clusters.slurm_cluster import SlurmCluster


def coordinator(job: int, step: int) -> str:
    os.environ.update(SLURM_JOB_ID=str(job), SLURM_STEP_ID=str(step), SLURM_STEP_NODELIST="n[1-2]")
    os.environ.update(SLURM_NTASKS="2", SLURM_PROCID="0", SLURM_LOCALID="0", SLURM_STEP_NUM_NODES="2")
    assert SlurmCluster.is_env_present()
    return SlurmCluster.get_coordinator_address(None, None)


first, second = coordinator(1000, 0), coordinator(1000, 1)
element, later = coordinator(1001, 0), coordinator(1000 + 4096, 0)
print("steps 1000.0 and 1000.1:", first, second)
print("the next element of an array, and the job 4096 later:", element, later)
assert first == second == later == "n1:62440", "two steps have one port"
assert element == "n1:62441", "an element has its own"
PY
