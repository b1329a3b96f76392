#!/bin/bash
# On a machine without network: installs the carried wheels beside its own torch, and runs gpu-check.
#   on_device.sh FOLDER WORDS...     FOLDER has whl/*.whl, tree.tar, and libnccl.so.2.xz where one is to be used
set -u
carried=$(realpath "$1")
shift
export PYTHONUNBUFFERED=1 PYTHONPATH=/tmp/site
python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target /tmp/site "$carried"/whl/*.whl || exit 1
rm -rf /tmp/tree && mkdir /tmp/tree && tar xf "$carried/tree.tar" -C /tmp/tree && cd /tmp/tree || exit 1
nccl=()
if [ -f "$carried/libnccl.so.2.xz" ]; then
    xz -dc "$carried/libnccl.so.2.xz" >/tmp/libnccl.so.2 && nccl=(--nccl /tmp/libnccl.so.2)
fi
exec python3 -m benchmarks.gpu --device cuda --out "${OUT:-/tmp/out}" "${nccl[@]}" "$@"
